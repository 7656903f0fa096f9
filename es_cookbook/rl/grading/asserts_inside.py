"""The program inside the sandbox that runs tests against code which must not know or judge them.

Two processes: this one holds the tests and compares; a fork of it, made before the tests are read,
holds the code. They talk through two pipes in JSON, so what the code returns arrives as plain data
of this process's own types: no `__eq__` of the code's runs here, and no frame, module or file of
the tests is where the code could find it. `es_cookbook.rl.grading.asserts` is the other end; it
passes the text of this file into the sandbox, where it is run and nowhere else.

Read from stdin: the length of the code in 16 digits, the code, and JSON with the tests. Written to
stdout: for each test that passes the token that came with the tests, and its index.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import sys
from collections.abc import Iterator, KeysView, ValuesView

TYPE_CHECKING = False  # As in typing, whose import takes as long as all others together.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

MOST_ITEMS = 1_000_000
"""Of what an iterator of the code's yields."""
_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}


def main() -> None:
    """Fork, then read the tests, run them and say which pass."""
    code = _read_exactly(int(_read_exactly(16)))
    from_tests, to_code = os.pipe()
    from_code, to_tests = os.pipe()
    if os.fork() == 0:
        os.close(to_code)
        os.close(from_code)
        nothing = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        _Served(os.fdopen(from_tests, "rb"), os.fdopen(to_tests, "wb")).run(code)
        os._exit(0)
    os.close(from_tests)
    os.close(to_tests)
    with open(0, "rb", closefd=False) as stdin:
        asked = json.loads(stdin.read())
    run_tests(_Code(os.fdopen(from_code, "rb"), os.fdopen(to_code, "wb")), **asked)


def run_tests(
    code: _Code,
    tests: list[str],
    names: list[str],
    classes: list[str],
    imports: str,
    setup: str,
    token: str,
) -> None:
    """Run each test; it passes if it ends without an exception."""
    known: dict[str, object] = {"__name__": "tests"}
    try:
        exec(compile(imports, "imports", "exec"), known)
        known |= code.names(names, classes)
        exec(compile(setup, "setup", "exec"), known)
    except BaseException as error:
        print(f"setup: {type(error).__name__}: {error}", file=sys.stderr)
        return
    for index, test in enumerate(tests):
        try:
            exec(compile(test, f"test {index + 1}", "exec"), known)
        except BaseException as error:
            print(f"{index + 1}: {type(error).__name__}: {error}"[:1000], file=sys.stderr)
        else:
            print(f"\n{token} {index}", flush=True)


class _Served:
    """The code's side: its names, and the objects of its own that the tests hold."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes
        self._objects: list[object] = []
        self._names: dict[str, object] = {"__name__": "solution"}

    def run(self, code: bytes) -> None:
        """Run the code, then answer until the tests are through."""
        exec(compile(code, "solution", "exec"), self._names)
        for line in self._reads:
            try:
                answer = ["returned", encode(self._answer(json.loads(line)), self._keep)]
            except Exception as error:
                answer = ["raised", type(error).__name__, str(error)[:1000]]
            self._writes.write(json.dumps(answer).encode() + b"\n")
            self._writes.flush()

    def _answer(self, request: list[Any]) -> object:
        what, *given = request
        if what == "names":
            return {name: self._names[name] for name in given[0] if name in self._names}
        own: Any = self._objects[given[0]]
        if what == "attribute":
            return getattr(own, given[1])
        args: Any
        kwargs: Any
        args, kwargs = (decode(each, self._objects.__getitem__) for each in given[1:])
        return own(*args, **kwargs)

    def _keep(self, value: object) -> list[object]:
        self._objects.append(value)
        return ["object", len(self._objects) - 1]


class _Code:
    """The tests' side."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes

    def names(self, names: list[str], classes: list[str]) -> dict[str, object]:
        """What the code has under those of the names that it defines."""
        found = self.ask(False, "names", names)
        assert isinstance(found, dict)
        for name in classes:
            if isinstance(found.get(name), _Remote):
                vars(found[name])["_is_known"] = True
        return {name: found[name] for name in names if name in found}

    def ask(self, is_known: bool, *request: object) -> object:
        """The code's answer; raises what the code raises, as a built-in exception of its name.

        Args:
            is_known: whether the tests know of what class an object is that comes back.
            request: what is asked, and of what.
        """
        try:
            self._writes.write(json.dumps(request).encode() + b"\n")
            self._writes.flush()
            line = self._reads.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise RuntimeError("the code has ended its process")
        kind, *found = json.loads(line)
        if kind == "returned":
            return decode(found[0], lambda index: _Remote(self, index, is_known))
        error = getattr(builtins, str(found[0]), None)
        ends_loops = error in (
            StopIteration,
            StopAsyncIteration,
        )  # With fewer items than there are.
        if isinstance(error, type) and issubclass(error, Exception) and not ends_loops:
            raise error(found[1])
        raise RuntimeError(f"{found[0]}: {found[1]}")


class _Remote:
    """An object that stays with the code: it can be called and passed back.

    It has attributes where its class is known: the tests name it, or passed such an object to the
    function that returned it. Others could have whatever method a test calls on what it takes for
    text or a list, and answer it as they like.
    """

    def __init__(self, code: _Code, index: int, is_known: bool) -> None:
        self._code, self._index, self._is_known = code, index, is_known

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call it where it is."""
        passed: list[_Remote] = [self]
        given = [encode(each, lambda value: _own(value, passed)) for each in (args, kwargs)]
        is_known = any(vars(each)["_is_known"] for each in passed)
        return self._code.ask(is_known, "call", self._index, *given)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._is_known:
            raise AttributeError(f"{name!r}: the tests do not name the class of what was returned")
        return self._code.ask(True, "attribute", self._index, name)


def _own(value: object, passed: list[_Remote]) -> list[object]:
    """How the tests send an object: only the code's own can go back to it."""
    if type(value) is not _Remote:
        raise TypeError(f"a {type(value).__name__} cannot be passed to the code, plain data can")
    passed.append(value)
    return ["object", vars(value)["_index"]]


def encode(value: object, keep: Callable[[object], list[object]]) -> object:
    """Plain data as JSON, each container as [kind, items]; `keep` encodes anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).decode("latin-1")]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, keep), encode(v, keep)] for k, v in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item, keep) for item in value]]
    if isinstance(value, Iterator | KeysView | ValuesView | range):
        return ["iterator", [encode(item, keep) for item in itertools.islice(value, MOST_ITEMS)]]
    return keep(value)


def decode(found: object, kept: Callable[[int], object]) -> object:
    """The value again, of this process's own built-in types."""
    if not isinstance(found, list):
        return found
    kind, content = found
    if kind == "object":
        return kept(content)
    if kind == "bytes":
        return content.encode("latin-1")
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decode(key, kept): decode(value, kept) for key, value in content}
    return _KINDS[kind]([decode(item, kept) for item in content])


def _read_exactly(count: int) -> bytes:
    """So many bytes of stdin and not one more: what follows is not for the code's process."""
    found = b""
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            raise EOFError
        found += part
    return found


if __name__ == "__main__":
    main()
