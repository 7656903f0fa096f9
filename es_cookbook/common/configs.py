"""Configs as text, and the names a user types for the parts of a config.

A Config is a chz object all the way down: other chz objects, `functools.partial`s and names of
importable functions, tuples, lists, dicts, numbers, strings, paths, None. `config_to_json` writes
it out in full, defaults included, so that a later change of a default does not change an old run;
`config_from_json` rebuilds the identical object. Classes and functions are written as
"module:qualname" and imported again, if they are trusted (`es_cookbook.common.references`) and the
field's type asks for them; nothing is ever pickled or evaluated.

What a user types for a part is `es_cookbook.common.names`, and the command line around it
`es_cookbook.common.cli`.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import chz

from es_cookbook.common.errors import ConfigError, nearest, other_format
from es_cookbook.common.fields.chz_fields import type_name
from es_cookbook.common.fields.declared_types import (
    argument_types,
    entry_types,
    fits,
    holds_class,
    item_type,
    may_be_called,
    may_hold_object,
    takes,
)
from es_cookbook.common.fields.parts import FUNCTIONS, may_be_named
from es_cookbook.common.fields.reach import check_reached
from es_cookbook.common.files import LARGEST_CONFIG, in_whole_characters, read_file
from es_cookbook.common.references import (
    ANYTHING_REACHED,
    is_own,
    of_program,
    reference,
    references_in,
    resolve,
    trusted_modules,
)
from es_cookbook.common.terminal import is_utf8, printable

_Loaded = TypeVar("_Loaded")
_Given = TypeVar("_Given")
_Found = TypeVar("_Found")

NOT_RECORDED = "not_recorded_while_none"
FORMAT = "$format"
"""Beside the fields of a whole config: the version of how it is written."""
FORMAT_VERSION = 1
_LONGEST_LINE = 500


def config_to_json(config: object) -> str:
    """The whole config as indented JSON, every default written out; it can be read back.

    Of an object it also says the version of the format (`FORMAT`).

    Raises:
        ConfigError: A value that cannot be rebuilt from text, for example a lambda, or that is not
            of its field's type; names the field.
    """
    plain = _to_plain(config, "config")
    _Reader(_trust_of(plain)).read(plain, "config", object)
    if isinstance(plain, dict):
        plain = {FORMAT: FORMAT_VERSION, **cast("dict[str, object]", plain)}
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)


def config_from_json(text: str, trust: Collection[str] = ()) -> object:
    """Rebuild the object that `config_to_json` wrote.

    The text may be anybody's. Of es_cookbook it names the classes that a field takes
    (`es_cookbook.common.fields.parts`) and no function; of the packages and scripts in `trust` and
    of the script that was run, classes and functions. Every value must be of its field's declared
    type, and a class or a function itself may stand only where that asks for one. Nothing is called
    but the chz classes. What it would reach (an address, a repository) has to be in `trust` too
    (`es_cookbook.common.fields.reach`).

    A field that is missing takes its default.

    Raises:
        ConfigError: Not such JSON or another version of it, a class or function that is unknown or
            not trusted, an unknown or missing field, or a value that its type or the class itself
            refuses.
    """
    return _read(text, object, trust)


def load_config(
    path: Path,
    config_class: type[_Loaded],
    trust: Collection[str] = (),
) -> _Loaded:
    """Read a config file that must hold a `config_class`.

    Raises:
        ConfigError: As `config_from_json`, another class, or the file cannot be read; names it.
    """
    return read_config(path, text_of(path), config_class, trust)


def read_config(
    path: Path,
    text: str,
    config_class: type[_Loaded],
    trust: Collection[str],
    typed: Collection[str] = (),
) -> _Loaded:
    """The same of a text from a file.

    Args:
        path: of the file, for sentences.
        text: that was read from it.
        config_class: as of `load_config`.
        trust: as of `config_from_json`.
        typed: options that the user gave in place of what the file has, and those that nobody uses:
            they may reach anything.
    """
    config = _at(path, lambda text: _read(text, config_class, trust, typed), text)
    return cast(_Loaded, config)


def load_fields(
    path: Path, types: Mapping[str, type], trust: Collection[str] = ()
) -> tuple[dict[str, object], Mapping[str, object]]:
    """Read some fields of the object in a config file; classes of others are not imported.

    Returns:
        The fields, each of its type, and the whole as JSON values.

    Raises:
        ConfigError: As `load_config`, or a field is missing.
    """
    modules = trusted_modules(trust)
    plain = _at(path, _parsed, text_of(path))
    entries = cast("dict[str, object]", plain) if isinstance(plain, dict) else {}
    if missing := [name for name in types if name not in entries]:
        raise ConfigError(f"{path} must hold a run's Config, which has a {' and a '.join(missing)}")

    def read(name: str) -> object:
        where = f"config.{name}"
        with _not_too_deep():
            found = _Reader(modules).read(entries[name], where, types[name])
            check_reached(found, trust, where=where)
        return found

    return {name: _at(path, read, name) for name in types}, entries


def trust_of(text: str) -> frozenset[str]:
    """All that a config of this process needs trusted to be read back: whoever made it had it.

    What is read with it may reach anything, so it is this config, or only compared with it.

    Args:
        text: from `config_to_json`, not from a file.
    """
    return frozenset(_trust_of(_parsed(text)))


def modules_named(text: str) -> list[str]:
    """Modules of the classes and functions that a config names, of any origin; imports none.

    Raises:
        ConfigError: Not JSON.
    """
    with _not_too_deep():
        return sorted(_modules_in(_parsed(text)))


def _read(text: str, declared: type, trust: Collection[str], typed: Collection[str] = ()) -> object:
    modules = trusted_modules(trust)
    plain = _parsed(text)
    with _not_too_deep():
        config = _Reader(modules).read(plain, "config", declared)
        check_reached(config, trust, typed)
    return config


def text_of(path: Path) -> str:
    """The text of a config file.

    Raises:
        ConfigError: It cannot be read; names it.
    """
    try:
        return read_file(path, LARGEST_CONFIG, path.parent).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be JSON in UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _parsed(text: str) -> object:
    with _not_too_deep():
        try:
            plain = in_whole_characters(text, json.loads(text))
        except ValueError as error:  # A mistake in JSON, or an integer of thousands of digits.
            raise ConfigError(f"a config must be JSON, found a mistake at {error}") from error
    if isinstance(plain, dict):
        version = cast("dict[str, object]", plain).pop(FORMAT, FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ConfigError(other_format(version, FORMAT_VERSION))
    return plain


@contextlib.contextmanager
def _not_too_deep() -> Generator[None]:
    try:
        yield
    except RecursionError as error:
        raise ConfigError("a config must be JSON that is not nested so deeply") from error


def _trust_of(plain: object) -> set[str]:
    return {ANYTHING_REACHED, *filter(is_own, references_in(plain)), *_modules_in(plain)}


def _modules_in(plain: object) -> set[str]:
    names = {text.partition(":")[0] for text in references_in(plain)}
    return {name for name in names if not name.endswith("__main__")}  # which needs no trust


def _to_plain(value: object, where: str) -> object:
    """JSON's own types, with a "$..." key for everything that JSON has no word for."""
    if isinstance(value, str | Path) and not is_utf8(str(value)):
        raise ConfigError(f"{where} must be text in UTF-8, found {str(value)!r}")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, int | float):
        return value
    if isinstance(value, Path):
        return {"$path": str(value)}
    if isinstance(value, list | tuple):
        items = cast("list[object] | tuple[object, ...]", value)
        plain = [_to_plain(item, f"{where}[{i}]") for i, item in enumerate(items)]
        return plain if isinstance(value, list) else {"$tuple": plain}
    if isinstance(value, dict):
        entries = cast("dict[object, object]", value)
        if all(isinstance(key, str) and not key.startswith("$") for key in entries):
            return {str(key): _to_plain(item, f"{where}[{key!r}]") for key, item in entries.items()}
        pairs = [[key, item] for key, item in entries.items()]
        return {"$dict": [_to_plain(pair, f"{where}[{pair[0]!r}]") for pair in pairs]}
    if chz.is_chz(value) and not isinstance(value, type):
        return {"$class": _at(where, reference, type(value))} | {
            name: _to_plain(part, f"{where}.{name}")
            for name, field in chz.chz_fields(value).items()
            if (part := getattr(value, field.x_name)) is not None
            or not (field.metadata or {}).get(NOT_RECORDED)
        }
    if isinstance(value, functools.partial):
        bound = cast("functools.partial[object]", value)
        return {
            "$partial": _at(where, reference, bound.func),
            "args": [_to_plain(arg, f"{where}({i})") for i, arg in enumerate(bound.args)],
            "keywords": _to_plain(dict(bound.keywords), where),
        }
    if callable(value):
        return {"$import": _at(where, reference, value)}
    raise ConfigError(
        f"{where}: a {type(value).__name__} cannot be written to a config; accepted: chz objects, "
        "partials, importable functions, tuples, lists, dicts, numbers, strings, paths and None"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Undoes `_to_plain`, as far as declared types and trust allow.

    `trust` are the packages, beside es_cookbook, whose classes and functions may be named, and what
    of es_cookbook may be named anywhere.
    """

    trust: Collection[str]

    def read(self, plain: object, where: str, declared: object) -> object:
        value = self._value(plain, where, declared)
        if not fits(value, declared):
            raise _unfit(where, declared, _shown(value))
        return value

    def _value(self, plain: object, where: str, declared: object) -> object:
        if isinstance(plain, list):
            return self._items(list, cast("list[object]", plain), where, declared)
        if not isinstance(plain, dict):
            return plain
        entries = cast("dict[str, object]", plain)
        marker = next((key for key in entries if key.startswith("$")), None)
        match marker, entries.get(marker or ""):
            case None, _:
                return dict(self._entries(list(entries.items()), where, declared))
            case "$class", str(text):
                fields = {key: item for key, item in entries.items() if key != "$class"}
                return self._object(text, fields, where, declared)
            case "$partial", str(text):
                return self._partial(text, entries, where, declared)
            case "$import", str(text):
                return self._callable(text, where, declared, partial=False)
            case "$tuple", list(items):
                return tuple(self._items(tuple, cast("list[object]", items), where, declared))
            case "$dict", list(pairs) if all(map(_is_pair, cast("list[object]", pairs))):
                found = self._entries(cast("list[list[object]]", pairs), where, declared)
                return _at(where, _dict, found)
            case "$path", str(text):
                return Path(text)
            case "$float", str(text) if text in ("inf", "-inf", "nan"):
                return float(text)
            case _:
                raise ConfigError(
                    f"{where}: {marker!r:.60} is not how a config is written; accepted: $class, "
                    "$partial, $import, $tuple, $dict, $path, $float, each with its own kind of "
                    "value"
                )

    def _items(self, kind: type, items: list[object], where: str, declared: object) -> list[object]:
        types = [item_type(declared, kind, i) for i in range(len(items))]
        if None in types:
            raise _unfit(where, declared, f"a {kind.__name__} of {len(items)}")
        pairs = zip(items, types, strict=True)
        return [self.read(item, f"{where}[{i}]", of) for i, (item, of) in enumerate(pairs)]

    def _entries(
        self, pairs: Sequence[Sequence[object]], where: str, declared: object
    ) -> list[tuple[object, object]]:
        types = entry_types(declared)
        if types is None:
            raise _unfit(where, declared, "a dict")
        return [
            (
                self.read(key, f"{where}[{key!r:.60}]", types[0]),
                self.read(item, f"{where}[{key!r:.60}]", types[1]),
            )
            for key, item in pairs
        ]

    def _object(
        self, text: str, plain_fields: Mapping[str, object], where: str, declared: object
    ) -> object:
        if not may_hold_object(declared):
            raise _unfit(where, declared, "an object")
        config_class = self._resolved(text, where, declared, is_part=True)
        if not (isinstance(config_class, type) and chz.is_chz(config_class)):
            raise ConfigError(f"{where}: {text} is not a chz class")
        if not holds_class(config_class, declared):
            raise _unfit(where, declared, f"an object of {text}")
        known = chz.chz_fields(config_class)
        values: dict[str, object] = {}
        for name, plain in plain_fields.items():
            if name not in known:
                raise ConfigError(
                    f"{where}: {config_class.__name__} has no field {name!r:.60}: "
                    f"{nearest(name[:60], known)}"
                )
            values[name] = self.read(plain, f"{where}.{name}", known[name].x_type)
        try:
            return config_class(**values)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{where}: {_one_line(str(error))}") from error

    def _partial(
        self, text: str, entries: Mapping[str, object], where: str, declared: object
    ) -> object:
        args, keywords = entries.get("args", []), entries.get("keywords", {})
        if not (isinstance(args, list) and isinstance(keywords, dict)):
            raise ConfigError(f"{where}: args of a $partial must be a list, and keywords a dict")
        function = self._callable(text, where, declared, partial=True)
        plain_args, plain_keywords = cast(
            "tuple[list[object], dict[str, object]]", (args, keywords)
        )
        try:
            arg_types, keyword_types = argument_types(function, plain_args, plain_keywords)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        typed_args = zip(plain_args, arg_types, strict=True)
        return functools.partial(
            function,
            *(self.read(arg, f"{where}({i})", of) for i, (arg, of) in enumerate(typed_args)),
            **{
                name: self.read(plain, f"{where}({name})", keyword_types[name])
                for name, plain in plain_keywords.items()
            },
        )

    def _callable(
        self, text: str, where: str, declared: object, partial: bool
    ) -> Callable[..., object]:
        if not may_be_called(declared):
            raise ConfigError(
                f"{where}: a class or a function itself may stand only where the type asks for "
                f"one, and it is {type_name(declared)}"
            )
        found = self._resolved(text, where, declared, is_part=False)
        if not takes(found, declared, partial):
            raise _unfit(where, declared, text)
        return found

    def _resolved(
        self, text: str, where: str, declared: object, *, is_part: bool
    ) -> Callable[..., object]:
        """What a name stands for, of es_cookbook only where it may.

        A package that is trusted may have imported something of es_cookbook: that is not its own.
        """
        self._check_own(text, where, declared, is_part)
        trust = {*self.trust}
        if is_part and may_be_named(text, declared):
            trust.add(text.partition(":")[0])  # Whoever installed it has trusted it.
        found = _at(where, functools.partial(resolve, trust=trust), text)
        self._check_own(f"{found.__module__}:{found.__qualname__}", where, declared, is_part)
        return found

    def _check_own(self, text: str, where: str, declared: object, is_part: bool) -> None:
        """Refuse what is es_cookbook's and not a part that the field takes; imports nothing."""
        if not is_own(text) or text in self.trust or text in FUNCTIONS.values():
            return
        if not is_part:
            raise ConfigError(
                f"{where}: {text!r:.200} is es_cookbook's own; a config from a file names "
                "functions, and classes themselves, of the packages and scripts in trust= alone"
            )
        if not may_be_named(of_program(text), declared):
            raise _unfit(where, declared, f"an object of {text!r:.200}")


def _unfit(where: str, declared: object, found: str) -> ConfigError:
    return ConfigError(f"{where} must be {type_name(declared)}, found {found}")


def _shown(value: object) -> str:
    if chz.is_chz(value):
        return f"an object of {type(value).__name__}"
    return f"{value!r:.60}"


def _one_line(text: str) -> str:
    """What a class said of values that may hold anything, of any length."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


def _is_pair(found: object) -> bool:
    return isinstance(found, list) and len(cast("list[object]", found)) == 2


def _dict(pairs: list[tuple[object, object]]) -> dict[object, object]:
    try:
        return dict(pairs)
    except TypeError as error:
        raise ConfigError(f"a key of a dict: {error}") from error


def _at(where: object, function: Callable[[_Given], _Found], given: _Given) -> _Found:
    """What the function returns; its `ConfigError` says where."""
    try:
        return function(given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
