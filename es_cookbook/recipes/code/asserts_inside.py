"""The program inside the sandbox that runs tests against code which must not know or judge them.

Two processes: this one holds the tests and compares; a fork of it, made before the tests are read,
holds the code. They talk through two pipes in JSON, so what the code returns arrives as plain data
of this process's own types: no `__eq__` of the code's runs here, and no frame, module or file of
the tests is where the code could find it. If the code's process ends in a test, by `os._exit` or a
fault, the next test gets a new one, an interpreter that starts anew and knows no test either.
`asserts` is the other end; it passes the text of this file into the sandbox, where it is run and
nowhere else.

Read from stdin: the length of the code in 16 digits, the code, and JSON with the tests. Written to
stdout: for each test that passes the token that came with the tests, and its index. With two
descriptors as arguments it is the code's process, and reads the code from the first.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import importlib
import itertools
import json
import os
import signal
import sys
import types
from collections.abc import ItemsView, Iterator, KeysView, ValuesView

TYPE_CHECKING = False  # As in typing, whose import takes as long as all others together.
if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, BinaryIO, TypeAlias

    _Split: TypeAlias = Callable[[Any], Sequence[object]]
    _Make: TypeAlias = Callable[[Any, list[Any]], object]

MOST_ITEMS = 1_000_000
"""Of what an iterator of the code's yields, and of containers in a value."""
MOST_LEVELS = 100_000
"""Of containers in each other; one that contains itself has no end."""
MOST_BITS = 4096
"""Of an integer that is written in decimal digits: Python refuses more than 4,300 of them."""
_SCALARS = (bool, int, float, str)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_FACTORIES: dict[str, Any] = {each.__name__: each for each in (*_SCALARS, *_CONTAINERS)}
"""Of a `defaultdict`; others stay with the code, which is asked for each value."""


def _call(kind: Callable[..., object], parts: list[Any]) -> object:
    if not _are_known(parts):
        raise TypeError(f"an object of the code's own in a {kind.__name__}")
    return kind(*parts)


def _collect(kind: Callable[[list[Any]], object], parts: list[Any]) -> object:
    return kind(parts)


def _zone_of(moment: datetime.datetime | datetime.time) -> object:
    """None for a zone of the code's own class: `isoformat` has its offset."""
    zone = moment.tzinfo
    return zone if zone is not None and _name(zone) else None


def _moment(kind: type[datetime.datetime], parts: list[Any]) -> object:
    text, fold, zone = parts
    found = kind.fromisoformat(text)
    return found.replace(fold=fold, tzinfo=zone or found.tzinfo)


def _with_fields(_: object, parts: list[Any]) -> object:
    name, fields, *values = parts
    if len(fields.split()) != len(values) or not _are_known(values):
        return tuple(values)
    return _named_tuple(name, fields)(*values)


@functools.lru_cache
def _named_tuple(name: str, fields: str) -> Callable[..., object]:
    return collections.namedtuple(name, fields, rename=True)  # pyright: ignore


def _namespace_value(_: object, parts: list[Any]) -> object:
    values: dict[str, Any]
    (values,) = parts
    if not _are_known(values.values()) or any(name.startswith("__") for name in values):
        raise TypeError("an object of the code's own in a SimpleNamespace")
    return types.SimpleNamespace(**values)


def _of_error(error: BaseException) -> list[object]:
    """Its built-in classes, the nearest first, and what one of them is made of."""
    known = [*vars(builtins).items()]
    names = [name for each in type.mro(type(error)) for name, found in known if found is each]
    try:
        if "BaseExceptionGroup" in names:  # Which Python 3.10 has not.
            group: Any = error
            return [names, group.message, [*group.exceptions]]
        if vars(builtins)[names[0]] is type(error):
            return [names, *error.args]
        return [names, str(error)[:1000]]
    except BaseException:
        return [names]


def _error(_: object, parts: list[Any]) -> BaseException:
    """An exception of the nearest class that can be made of its arguments."""
    names, *given = parts
    given = given if _are_known(given) else []
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(Exception):
                return kind(*given)
    return RuntimeError(*given)


def _are_known(values: Iterable[object]) -> bool:
    """Whether each may be an attribute: an object of the code's own could answer as a method."""
    return all(_place(each).is_known for each in values if type(each) is _Remote)


_PARTS: dict[str, tuple[_Split, _Make]] = {
    "builtins.list": (list, _collect),
    "builtins.tuple": (list, _collect),
    "builtins.set": (list, _collect),
    "builtins.frozenset": (list, _collect),
    "builtins.dict": (
        lambda v: [*itertools.chain.from_iterable(v.items())],
        lambda kind, parts: kind(zip(parts[::2], parts[1::2], strict=True)),
    ),
    "builtins.iter": (lambda v: [*itertools.islice(v, MOST_ITEMS)], _collect),
    "builtins.bytes": (lambda v: [bytes(v).decode("latin-1"), "latin-1"], _call),
    "builtins.bytearray": (lambda v: [bytes(v)], _call),
    "builtins.memoryview": (
        lambda v: [v.tobytes(), v.format],
        lambda kind, parts: kind(parts[0]).cast(parts[1]),
    ),
    "builtins.BaseException": (_of_error, _error),
    "builtins.ellipsis": (lambda _: [], lambda _, parts: ...),
    "builtins.NotImplementedType": (lambda _: [], lambda _, parts: NotImplemented),
    "builtins.mappingproxy": (
        lambda v: [dict(v)],
        lambda _, parts: types.MappingProxyType[object, object](dict(*parts)),
    ),
    "builtins.slice": (lambda v: [v.start, v.stop, v.step], _call),
    "builtins.complex": (lambda v: [v.real, v.imag], _call),
    "builtins.range": (lambda v: [v.start, v.stop, v.step], _call),
    "builtins.dict_keys": (lambda v: [[*v]], lambda _, parts: dict.fromkeys(parts[0]).keys()),
    "builtins.dict_values": (
        lambda v: [[*v]],
        lambda _, parts: dict[int, object](enumerate(parts[0])).values(),
    ),
    "builtins.dict_items": (lambda v: [[*v]], lambda _, parts: dict(parts[0]).items()),
    "array.array": (lambda v: [v.typecode, [*v]], _call),
    "collections.ChainMap": (lambda v: v.maps, _call),
    "collections.Counter": (lambda v: [dict(v)], _call),
    "collections.OrderedDict": (lambda v: [dict(v)], _call),
    "collections.defaultdict": (
        lambda v: [
            next(
                (name for name, each in _FACTORIES.items() if each is v.default_factory),
                v.default_factory,
            ),
            dict(v),
        ],
        lambda kind, parts: kind(_FACTORIES.get(parts[0], parts[0]), parts[1]),
    ),
    "collections.deque": (lambda v: [[*v], v.maxlen], _call),
    "collections.namedtuple": (
        lambda v: [type(v).__name__, " ".join(v._fields), *v],
        _with_fields,
    ),
    "collections.UserDict": (lambda v: [v.data], _call),
    "collections.UserList": (lambda v: [v.data], _call),
    "collections.UserString": (lambda v: [v.data], _call),
    "datetime.date": (lambda v: [v.isoformat()], lambda kind, parts: kind.fromisoformat(*parts)),
    "datetime.datetime": (lambda v: [v.isoformat(), v.fold, _zone_of(v)], _moment),
    "datetime.time": (lambda v: [v.isoformat(), v.fold, _zone_of(v)], _moment),
    "datetime.timedelta": (lambda v: [v.days, v.seconds, v.microseconds], _call),
    "datetime.timezone": (lambda v: v.__getinitargs__(), _call),
    "decimal.Decimal": (lambda v: [str(v)], _call),
    "fractions.Fraction": (lambda v: [v.numerator, v.denominator], _call),
    "pathlib.PosixPath": (lambda v: [str(v)], _call),
    "pathlib.PurePosixPath": (lambda v: [str(v)], _call),
    "pathlib.PureWindowsPath": (lambda v: [str(v)], _call),
    "time.struct_time": (list, _collect),
    "types.SimpleNamespace": (lambda v: [dict[str, object](vars(v))], _namespace_value),
    "uuid.UUID": (lambda v: [v.hex], _call),
    "zoneinfo.ZoneInfo": (lambda v: [v.key], _call),
}
"""Class of values that arrive as such -> what they are made of, and how they are made of it."""
_ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Of those a loop makes an end, with fewer items than there are."""


def main() -> None:
    """Fork, then read the tests, run them and say which pass; or serve the code."""
    if len(sys.argv) > 1:
        reads, writes = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
        _Served(reads, writes).run(json.loads(reads.readline()))
        return
    code = _Code(_read_exactly(int(_read_exactly(16))).decode())
    code.start()
    with open(0, "rb", closefd=False) as stdin:
        asked = json.loads(stdin.read())
    run_tests(code, **asked)


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
    known = _namespace("tests")

    def prepare() -> None:
        _run(imports, "imports", known)
        known.update(code.names(names, classes))
        _run(setup, "setup", known)

    try:
        prepare()
    except BaseException as error:
        print(f"setup: {_told(error)}", file=sys.stderr)
        return
    for index, test in enumerate(tests):
        try:
            if code.has_ended:
                code = code.again()
                prepare()
            _run(test, f"test {index + 1}", known)
        except BaseException as error:
            print(f"{index + 1}: {_told(error)}"[:1000], file=sys.stderr)
        else:
            print(f"\n{token} {index}", flush=True)


def _namespace(module: str) -> dict[str, Any]:
    """The names of a new module, in which `sys.modules` finds what its classes look for there."""
    sys.modules[module] = types.ModuleType(module)
    return vars(sys.modules[module])


def _run(text: str, where: str, names: dict[str, Any]) -> None:
    exec(compile(text, where, "exec", dont_inherit=True), names)  # Not this file's `annotations`.


class _Served:
    """The code's side: its names, and the objects of its own that the tests hold."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO) -> None:
        self._reads, self._writes = reads, writes
        self._objects: list[object] = []
        self._names = _namespace("solution")

    def run(self, code: str) -> None:
        """Run the code, then answer until the tests are through."""
        _run(code, "solution", self._names)
        for line in self._reads:
            try:
                is_known, *request = json.loads(line)
                found = self._answer(request)
                answer = json.dumps(["returned", encode(found, self._keep, is_known)])
            except BaseException as error:  # Also `sys.exit`: the next test is to be answered.
                answer = json.dumps(["raised", self._raised(error)])
            self._writes.write(answer.encode() + b"\n")
            self._writes.flush()

    def _answer(self, request: list[Any]) -> object:
        what, *given = request
        if what == "names":
            return {name: self._names[name] for name in given[0] if name in self._names}
        own: Any = self._objects[given[0]]
        if what == "attribute":
            return getattr(own, given[1])
        if what == "set":
            return setattr(own, given[1], decode(given[2], self._objects.__getitem__))
        if what == "delete":
            return delattr(own, given[1])
        args: Any
        kwargs: Any
        args, kwargs = (decode(each, self._objects.__getitem__) for each in given[1:])
        return own(*args, **kwargs)

    def _raised(self, error: BaseException) -> list[object]:
        try:
            return encode(error, self._keep)
        except BaseException:  # Of its arguments.
            return encode(_error(None, _of_error(error)[:1]), self._keep)

    def _keep(self, value: object) -> int:
        self._objects.append(value)
        return len(self._objects) - 1


class _Code:
    """The tests' side: the process that holds the code."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.has_ended = False

    def start(self, is_first: bool = True) -> None:
        """Start the process: a fork before tests are read, an interpreter of its own later."""
        from_tests, to_code = os.pipe()
        from_code, to_tests = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(to_code)
            os.close(from_code)
            nothing = os.open("/dev/null", os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            if is_first:
                _Served(os.fdopen(from_tests, "rb"), os.fdopen(to_tests, "wb")).run(self._text)
                os._exit(0)
            for descriptor in (from_tests, to_tests):
                os.set_inheritable(descriptor, True)
            os.execv(sys.executable, [*sys.orig_argv, str(from_tests), str(to_tests)])
        os.close(from_tests)
        os.close(to_tests)
        self._reads, self._writes = os.fdopen(from_code, "rb"), os.fdopen(to_code, "wb")

    def again(self) -> _Code:
        """The code in a new process; what is left of this one is killed."""
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        code = _Code(self._text)
        code.start(is_first=False)
        code._write(self._text)
        return code

    def names(self, names: list[str], classes: list[str]) -> dict[str, object]:
        """What the code has under those of the names that it defines."""
        found = self.ask(False, "names", names)
        assert isinstance(found, dict)
        for name in classes:
            if isinstance(found.get(name), _Remote):
                _place(found[name]).is_known = True
        return {name: found[name] for name in names if name in found}

    def ask(self, is_known: bool, *request: object) -> object:
        """The code's answer; raises what the code raises, as a built-in exception of its name.

        Args:
            is_known: whether the tests know of what class an object is that comes back.
            request: what is asked, and of what.
        """
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._write([is_known, *request])
            line = self._reads.readline()
        if not line.endswith(b"\n"):
            self.has_ended = True
            raise RuntimeError("the code has ended its process")
        kind, answer = json.loads(line)
        found = decode(answer, lambda index: _Remote(self, index, is_known))
        if kind == "returned":
            return found
        if isinstance(found, BaseException) and not isinstance(found, _ENDS_LOOPS):
            raise found
        raise RuntimeError(type(found).__name__)

    def _write(self, what: object) -> None:
        self._writes.write(json.dumps(what).encode() + b"\n")
        self._writes.flush()


class _Remote:
    """An object that stays with the code: it can be called and passed back.

    It has attributes, which can be set, where its class is known: the tests name it, or passed such
    an object to the function that returned it. Others could have whatever method a test calls on
    what it takes for text or a list, and answer it as they like.
    """

    def __init__(self, code: _Code, index: int, is_known: bool) -> None:
        vars(self)[_PLACE] = _Place(code, index, is_known)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call it where it is."""
        passed: list[_Remote] = [self]
        given = [encode(each, lambda value: _own(value, passed)) for each in (args, kwargs)]
        is_known = any(_place(each).is_known for each in passed)
        return _place(self).code.ask(is_known, "call", _place(self).index, *given)

    def __getattr__(self, name: str) -> object:
        return self._ask("attribute", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("set", name, encode(value, lambda each: _own(each, [self])))

    def __delattr__(self, name: str) -> None:
        self._ask("delete", name)

    def _ask(self, what: str, name: str, *given: object) -> object:
        place = _place(self)
        if name.startswith("__"):
            raise AttributeError(name)
        if not place.is_known:
            raise AttributeError(f"{name!r}: the tests do not name the class of what was returned")
        return place.code.ask(True, what, place.index, name, *given)


_PLACE = "a place"
"""In `vars`, under what is no attribute's name."""


class _Place:
    """Where an object of the code's own is, and whether the tests know its class."""

    def __init__(self, code: _Code, index: int, is_known: bool) -> None:
        self.code, self.index, self.is_known = code, index, is_known


def _place(remote: object) -> _Place:
    return vars(remote)[_PLACE]


def _own(value: object, passed: list[_Remote]) -> int:
    """How the tests send an object: only the code's own can go back to it."""
    if type(value) is not _Remote:
        raise TypeError(f"a {type(value).__name__} cannot be passed to the code, plain data can")
    if _place(value).code is not _place(passed[0]).code:
        raise RuntimeError("the code has ended the process of an object")
    passed.append(value)
    return _place(value).index


def encode(value: object, keep: Callable[[object], int], keeps_own: bool = False) -> list[object]:
    """Plain data as JSON, which has the same depth however deeply the data are nested.

    The value, and its containers as [kind, parts], outer ones first. What is no container stands
    for itself, a container's place is [its index]. `keep` numbers what stays where it is; with
    `keeps_own` also values of the standard library whose classes have methods of their own.
    """
    containers: list[tuple[object, int]] = []

    def told(part: object, level: int) -> object:
        if part is None or (isinstance(part, _SCALARS) and not _is_long(part)):
            return part
        if len(containers) == MOST_ITEMS or level == MOST_LEVELS:
            raise ValueError("too many containers, or one that contains itself")
        containers.append((part, level))
        return [len(containers) - 1]

    whole = told(value, 0)
    found: list[object] = []
    for each, level in containers:  # They become more on the way.
        kind, parts = _taken_apart(each, keep, keeps_own)
        found.append([kind, [told(part, level + 1) for part in parts]])
    return [whole, found]


def _is_long(value: object) -> bool:
    return isinstance(value, int) and int.bit_length(value) > MOST_BITS


def _taken_apart(
    value: object, keep: Callable[[object], int], keeps_own: bool
) -> tuple[str, Sequence[object]]:
    if isinstance(value, int):
        return "int", [hex(value)]
    name = _name(value, keeps_own)
    return (name, _PARTS[name][0](value)) if name else ("object", [keep(value)])


def _name(value: object, keeps_own: bool = False) -> str | None:
    """Of the class in `_PARTS` as whose a value arrives."""
    own = type(value)
    if issubclass(own, BaseException):
        stays = keeps_own and own.__module__ != "builtins"
        return None if stays else "builtins.BaseException"
    if issubclass(own, tuple) and hasattr(own, "_fields"):
        return "collections.namedtuple"
    stays = keeps_own or own.__hash__ is None  # What it holds may change.
    for each in own.__mro__:
        name = f"{each.__module__}.{each.__qualname__}".replace("._local.", ".")  # Python 3.13
        if name in _PARTS:
            return name
        if stays and not all(named.startswith("_") for named in vars(each)):
            break  # Methods of its own, which stay with the code.
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            return f"builtins.{kind.__name__}"
    views = (Iterator, KeysView, ValuesView, ItemsView)
    return "builtins.iter" if isinstance(value, views) else None


def decode(found: list[Any], kept: Callable[[int], object]) -> object:
    """The value again, of this process's own built-in types."""
    whole, containers = found
    made: list[object] = [None] * len(containers)

    def told(part: list[int] | str | float | None) -> object:
        return made[part[0]] if isinstance(part, list) else part

    for index in reversed(range(len(containers))):  # Inner ones first.
        kind, parts = containers[index]
        made[index] = _made(kind, [told(part) for part in parts], kept)
    return told(whole)


def _made(kind: str, parts: list[Any], kept: Callable[[int], object]) -> object:
    if kind == "object":
        return kept(*parts)
    if kind == "int":
        return int(parts[0], 16)
    module, _, name = kind.partition(".")  # Imported when it is needed, as few are.
    return _PARTS[kind][1](getattr(importlib.import_module(module), name, None), parts)


def _told(error: BaseException) -> str:
    """An exception in words; its text may be the code's own function, or a number too long."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__}, which has no text"


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
