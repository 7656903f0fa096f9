"""The program inside the sandbox: runs tests against code that must not know or judge them.

Two processes: this one holds the tests and compares; a fork of it, made before the tests are read,
holds the code. They exchange pickles of plain data through two pipes. The reader of a pickle
accepts a short list of classes, so no `__eq__` of the code runs here, and the code cannot find a
test in its own memory. If the code ends its process, the tests that follow have failed.
`asserts` passes the text of this file into the sandbox; it runs nowhere else.

Read from stdin: the length of the code in 16 digits, the code, and JSON with the tests. Written to
stdout: for each test that passes, the token that came with the tests and the test's index.
"""

# ruff: noqa: ANN401 - values are of any class.

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import itertools
import json
import os
import pickle
import sys
import types
from collections.abc import ItemsView, Iterator, KeysView, ValuesView

TYPE_CHECKING = False  # Importing typing would take as long as everything else here.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

_BUILT_IN = (int, float, complex, str, bytes, bytearray, range, tuple, list, set, frozenset, dict)
_LIBRARY = {
    "collections": ("Counter", "OrderedDict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
}
"""Classes whose values are exchanged as they are."""
_ITERABLES = (Iterator, KeysView, ValuesView, ItemsView)
"""Types that arrive as lists."""
_MOST_ITEMS = 1_000_000
"""Limit on the items of such a list."""
_ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)


def main() -> None:
    """Fork the code's process, then read the tests, run them and print which pass."""
    code = _read_exactly(int(_read_exactly(16))).decode()
    ask = _started(code)
    with open(0, "rb", closefd=False) as stdin:
        asked = json.loads(stdin.read())
    known = _namespace("tests")
    try:
        _run(asked["imports"], "imports", known)
        known.update(ask("names", asked["names"]))
        _run(asked["setup"], "setup", known)
    except BaseException as error:
        print(f"setup: {type(error).__name__}: {error}", file=sys.stderr)
        return
    for index, test in enumerate(asked["tests"]):
        try:
            _run(test, f"test {index + 1}", known)
        except BaseException as error:
            print(f"{index + 1}: {type(error).__name__}: {error}"[:1000], file=sys.stderr)
        else:
            print(f"\n{asked['token']} {index}", flush=True)


def _started(code: str) -> Callable[..., Any]:
    """Start the code's process; returns what asks it."""
    from_tests, to_code = os.pipe()
    from_code, to_tests = os.pipe()
    if os.fork() == 0:
        os.close(to_code)
        os.close(from_code)
        nothing = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        try:
            _serve(code, os.fdopen(from_tests, "rb"), os.fdopen(to_tests, "wb"))
        finally:
            os._exit(0)
    os.close(from_tests)
    os.close(to_tests)
    reads, writes = os.fdopen(from_code, "rb"), os.fdopen(to_code, "wb")

    def ask(*request: object) -> Any:
        """Return the code's answer; raise what the code raises, as a built-in exception."""
        message = _encoded(request, _index)
        try:
            writes.write(message)
            writes.flush()
            kind, found = _Reader(reads, lambda index: _Remote(ask, index)).load()
        except (EOFError, BrokenPipeError):
            raise RuntimeError("the code has ended its process") from None
        if kind == "returned":
            return found
        raise _error(*found)

    return ask


def _serve(code: str, reads: BinaryIO, writes: BinaryIO) -> None:
    """Run the code, then answer calls until the tests are done."""
    names = _namespace("solution")
    kept: list[Any] = []

    def keep(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    _run(code, "solution", names)
    while True:
        try:
            what, *given = _Reader(reads, kept.__getitem__).load()
        except EOFError:
            return
        try:
            if what == "names":
                found = {name: names[name] for name in given[0] if name in names}
            else:
                args, kwargs = given[1:]
                found = kept[given[0]](*args, **kwargs)
            answer = _encoded(("returned", found), keep)
        except BaseException as error:  # Also `sys.exit`: the next test is to be answered.
            answer = _encoded(("raised", _nearest(error)), keep)
        writes.write(answer)
        writes.flush()


class _Remote:
    """An object that stays in the code's process: it can be called and passed back."""

    def __init__(self, ask: Callable[..., Any], index: int) -> None:
        self._ask, self.index = ask, index

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._ask("call", self.index, args, kwargs)


def _index(value: object) -> int:
    """Return the index under which tests send an object, which must be the code's own."""
    if type(value) is not _Remote:
        raise TypeError(f"a {type(value).__name__} cannot be passed to the code, plain data can")
    return value.index


def _kept(index: int) -> Any:
    """Stand in a pickle for an object that stays in the code's process."""
    raise NotImplementedError(index)


class _Writer(pickle.Pickler):
    """Writes plain data; `keep` numbers everything else."""

    def __init__(self, file: BinaryIO, keep: Callable[[object], int]) -> None:
        super().__init__(file, protocol=4)
        self._keep = keep

    def reducer_override(self, value: Any) -> Any:
        """Reduce values of derived classes to the nearest class that is exchanged."""
        if value is _kept or _is_exchanged(value) or _is_exchanged(type(value)):
            return NotImplemented
        for each in type(value).__mro__:
            if _is_exchanged(each):
                return each, (str.__str__(value) if each is str else each(value),)
        if isinstance(value, _ITERABLES):
            return list, ([*itertools.islice(value, _MOST_ITEMS)],)
        return _kept, (self._keep(value),)


class _Reader(pickle.Unpickler):
    """Reads plain data of this process's own types."""

    def __init__(self, file: BinaryIO, kept: Callable[[int], object]) -> None:
        super().__init__(file)
        self._kept = kept

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of that name; only some classes are accepted."""
        if name == _kept.__name__:
            return self._kept
        found = getattr(importlib.import_module(module), name) if module in _LIBRARY else None
        found = getattr(builtins, name, None) if module == "builtins" else found
        if not _is_exchanged(found):
            raise pickle.UnpicklingError(f"{module}.{name} is not exchanged")
        return found


def _is_exchanged(kind: object) -> bool:
    if not isinstance(kind, type):
        return False
    return kind in _BUILT_IN or kind.__name__ in _LIBRARY.get(kind.__module__, ())


def _encoded(value: object, keep: Callable[[object], int]) -> bytes:
    file = io.BytesIO()
    _Writer(file, keep).dump(value)
    return file.getvalue()


def _nearest(error: BaseException) -> tuple[list[str], str]:
    """Return the names of an exception's built-in classes, nearest first, and its text."""
    known = vars(builtins)
    names = [each.__name__ for each in type.mro(type(error)) if each in known.values()]
    try:
        return names, str(error)[:1000]
    except BaseException:
        return names, ""


def _error(names: list[str], text: str) -> BaseException:
    """Return an exception of the nearest class that accepts a text."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(Exception):
                found = kind(text)
                return RuntimeError(name) if isinstance(found, _ENDS_LOOPS) else found
    return RuntimeError(text)


def _namespace(module: str) -> dict[str, Any]:
    """Return the names of a new module, which is in `sys.modules` for its classes."""
    sys.modules[module] = types.ModuleType(module)
    return vars(sys.modules[module])


def _run(text: str, where: str, names: dict[str, Any]) -> None:
    exec(compile(text, where, "exec", dont_inherit=True), names)  # Not this file's `annotations`.


def _read_exactly(count: int) -> bytes:
    """Read exactly so many bytes of stdin: the rest is not for the code's process."""
    found = b""
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            raise EOFError
        found += part
    return found


if __name__ == "__main__":
    main()
