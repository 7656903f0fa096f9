"""Configs as text.

A Config is a chz object all the way down: other chz objects, `functools.partial`s and names of
importable functions, tuples, lists, dicts, numbers, strings, paths, None. `config_to_json` writes
it out in full, defaults included, so that a later change of a default does not change an old run;
`config_from_json` rebuilds the identical object. Classes and functions are written as
"module:qualname" and imported again, if they are trusted (`es_cookbook.common.trust`) and the
field's type asks for them; nothing is ever pickled or evaluated.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import chz

from es_cookbook.common.checks import check_types, fits, may_be_called, type_name
from es_cookbook.common.errors import ConfigError, nearest, other_format
from es_cookbook.common.files import LARGEST_CONFIG, read_file, strict_json
from es_cookbook.common.registry import Registered, parts_of
from es_cookbook.common.terminal import is_utf8, printable
from es_cookbook.common.trust import (
    ANYTHING_REACHED,
    Reached,
    check_reached,
    is_own,
    reached,
    reference,
    resolve,
    script_of,
    trusted_modules,
)

_Loaded = TypeVar("_Loaded")

NOT_RECORDED = "not_recorded_while_none"
"""Metadata of a field that a config file lacks while it is None."""

FUNCTIONS = Registered("functions")
"""Functions of es_cookbook that a config may name: rewards of recipes, which only grade a text."""
FORMAT = "$format"
"""Beside the fields of a whole config: the version of how it is written."""
FORMAT_VERSION = 1
_LONGEST_LINE = 500
_NAMES = re.compile(r'"\$(?:class|partial|import)": "([^"]*)"')
"""Names of classes and functions in the text of a config of this process."""


def config_to_json(config: object) -> str:
    """Return the whole config as indented JSON, with every default, to be read back.

    An object also has the version of the format (`FORMAT`).

    Raises:
        ConfigError: A value that cannot be rebuilt from text, for example a lambda, or that is not
            of its field's type; names the field.
    """
    plain = _to_plain(config, "config")
    if isinstance(plain, dict):
        plain = {FORMAT: FORMAT_VERSION, **cast("dict[str, object]", plain)}
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
    config_from_json(text, trust_of(text))
    return text


def config_from_json(text: str, trust: Collection[str] = ()) -> object:
    """Rebuild the object that `config_to_json` wrote.

    The text may be a stranger's. Of es_cookbook it may name chz classes that fit the field's type,
    and the functions in `FUNCTIONS`; of the packages and scripts in `trust` and of the script that
    was run, classes and functions. Every value must be of its field's declared
    type, and a class or a function itself may stand only where that asks for one. Nothing is called
    but the chz classes. All that it would reach (an address, a repository) has to be in `trust` too
    (`es_cookbook.common.trust`).

    A field that is missing takes its default.

    Raises:
        ConfigError: Not such JSON or another version of it, a class or function that is unknown or
            not trusted, an unknown or missing field, or a value that its type or the class itself
            refuses.
    """
    return _read(_parsed(text), object, trust)


def load_config(
    path: Path,
    config_class: type[_Loaded],
    trust: Collection[str] = (),
    typed: Collection[str] = (),
    text: str | None = None,
) -> _Loaded:
    """Read a config file that must hold a `config_class`.

    Args:
        path: path of the file.
        config_class: class of the config.
        trust: as in `config_from_json`.
        typed: options that the user gave in place of what the file has, and those that are not
            used: they may reach anything.
        text: contents of the file, if it has been read.

    Raises:
        ConfigError: As `config_from_json`, another class, or the file cannot be read; names it.
    """
    text = text_of(path) if text is None else text
    with _at(path):
        return cast(_Loaded, _read(_parsed(text), config_class, trust, typed))


def load_fields(
    path: Path, types: Mapping[str, type], trust: Collection[str] = ()
) -> tuple[dict[str, object], Mapping[str, object]]:
    """Read some fields of the object in a config file; classes of others are not imported.

    Returns:
        The fields, each of its type, and the whole as JSON values.

    Raises:
        ConfigError: As `load_config`, or a field is missing.
    """
    text = text_of(path)
    with _at(path):
        plain = _parsed(text)
        entries = cast("dict[str, object]", plain) if isinstance(plain, dict) else {}
        if types.keys() - entries.keys():
            raise ConfigError(f"it must hold a run's Config, which has a {' and a '.join(types)}")
        return {
            name: _read(entries[name], declared, trust, where=f"config.{name}")
            for name, declared in types.items()
        }, entries


def trust_of(text: str) -> frozenset[str]:
    """Return everything that a config of this process needs trusted to be read back.

    Configs read with it may reach anything, so they are this config, or only compared with it.

    Args:
        text: result of `config_to_json`, not of a file.
    """
    names = _NAMES.findall(text)
    modules = (name.partition(":")[0] for name in names)
    return frozenset({ANYTHING_REACHED, *filter(is_own, names), *modules})


def trust_option(text: str) -> dict[str, str]:
    """Return the `trust=` option with which another program can read a config of this process.

    It is empty if the config needs none.

    Args:
        text: result of `config_to_json`, not of a file.
    """
    reader = _Reader(trust_of(text))
    reader.read(_parsed(text), "config", object)
    code = (name for name in _NAMES.findall(text) if not (is_own(name) or parts_of(name)))
    modules = sorted({name.partition(":")[0] for name in code})
    named = (str(script_of(module) or module.partition(".")[0]) for module in modules)
    words = dict.fromkeys([*named, *(each.word for each in reader.reached)])
    return {"trust": ",".join(words)} if words else {}


def _read(
    plain: object,
    declared: type,
    trust: Collection[str],
    typed: Collection[str] = (),
    where: str = "config",
) -> object:
    reader = _Reader(trusted_modules(trust))
    value = reader.read(plain, where, declared)
    check_reached(reader.reached, trust, typed)
    return value


def text_of(path: Path) -> str:
    """Return the text of a config file.

    Raises:
        ConfigError: It cannot be read; names it.
    """
    with _at(path):
        return read_file(path, LARGEST_CONFIG, path.parent).decode("utf-8")


def _parsed(text: str) -> object:
    try:
        plain = strict_json(text, halves=False)
    except ValueError as error:
        raise ConfigError(f"a config must be JSON; this {error}") from error
    if isinstance(plain, dict):
        version = cast("dict[str, object]", plain).pop(FORMAT, FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ConfigError(other_format(version, FORMAT_VERSION))
    return plain


def _to_plain(value: object, where: str) -> object:
    """Convert a value to JSON's own types, with a "$..." key for what JSON cannot express."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, str | Path) and is_utf8(str(value)):
        return value if isinstance(value, str) else {"$path": str(value)}
    if isinstance(value, list | tuple):
        items = cast("list[object] | tuple[object, ...]", value)
        plain = [_to_plain(item, f"{where}[{i}]") for i, item in enumerate(items)]
        return plain if isinstance(value, list) else {"$tuple": plain}
    if isinstance(value, dict):
        entries = cast("dict[Any, object]", value)
        if all(isinstance(key, str) and is_utf8(key) and key[:1] != "$" for key in entries):
            return {key: _to_plain(item, f"{where}[{key!r}]") for key, item in entries.items()}
    if chz.is_chz(value) and not isinstance(value, type):
        check_types(value, prefix=f"{where}.")  # Or it could not be read again.
        return {"$class": _name_of(type(value), where)} | {
            name: _to_plain(part, f"{where}.{name}")
            for name, field in chz.chz_fields(value).items()
            if (part := getattr(value, field.x_name)) is not None
            or not (field.metadata or {}).get(NOT_RECORDED)
        }
    if isinstance(value, functools.partial):
        bound = cast("functools.partial[object]", value)
        return {
            "$partial": _name_of(bound.func, where),
            "args": _to_plain(list(bound.args), where),
            "keywords": _to_plain(dict(bound.keywords), where),
        }
    if callable(value):
        return {"$import": _name_of(value, where)}
    raise ConfigError(
        f"{where}: {value!r:.60} cannot be written to a config; accepted: chz objects, partials, "
        "importable functions, tuples, lists, dicts with names as keys, finite numbers, text in "
        "UTF-8, paths and None"
    )


def _name_of(value: Callable[..., object], where: str) -> str:
    with _at(where):
        return reference(value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Undoes `_to_plain`, as far as declared types and trust allow.

    Attributes:
        trust: packages, beside es_cookbook, whose classes and functions may be named, and what of
            es_cookbook may be named anywhere.
        reached: all that the objects reach which it has read.
    """

    trust: Collection[str]
    reached: list[Reached] = dataclasses.field(default_factory=list[Reached])

    def read(self, plain: object, where: str, declared: object) -> object:
        try:
            value = self._value(plain, where, declared)
        except RecursionError as error:
            raise ConfigError("a config must be JSON that is not nested so deeply") from error
        if not fits(value, declared):
            raise ConfigError(f"{where} must be {type_name(declared)}, found {value!r:.60}")
        return value

    def _value(self, plain: object, where: str, declared: object) -> object:
        """Rebuild a value without checking its type; its items have the same declared type."""
        match plain:
            case list():
                items = cast("list[object]", plain)
                return [self._value(x, f"{where}[{i}]", declared) for i, x in enumerate(items)]
            case {"$class": str(text), **fields}:
                return self._object(text, cast("dict[str, object]", fields), where)
            case {"$partial": str(text), "args": list(args), "keywords": dict(keywords)}:
                bound = cast("list[object]", self._value(args, where, object))
                named = cast("dict[str, object]", self._value(keywords, where, object))
                return functools.partial(self._callable(text, where, declared), *bound, **named)
            case {"$import": str(text)}:
                return self._callable(text, where, declared)
            case {"$tuple": list(items)}:
                return tuple(cast("list[object]", self._value(items, where, declared)))
            case {"$path": str(text)}:
                return Path(text)
            case dict():
                entries = cast("dict[str, object]", plain)
                if marker := next((key for key in entries if key.startswith("$")), None):
                    raise ConfigError(f"{where}: {marker!r:.60} is not how a config is written")
                return {
                    key: self._value(item, f"{where}[{key!r:.60}]", declared)
                    for key, item in entries.items()
                }
            case _:
                return plain

    def _object(self, text: str, plain_fields: Mapping[str, object], where: str) -> object:
        config_class = self._resolved(text, where)
        if not (isinstance(config_class, type) and chz.is_chz(config_class)):
            raise ConfigError(f"{where}: {text} is not a chz class")
        known = chz.chz_fields(config_class)
        values: dict[str, object] = {}
        for name, plain in plain_fields.items():
            if name not in known:
                said = f"{config_class.__name__} has no field {name!r:.60}"
                raise ConfigError(f"{where}: {said}: {nearest(name[:60], known)}")
            values[name] = self.read(plain, f"{where}.{name}", known[name].x_type)
        with _at(where):
            found = config_class(**values)
        self.reached.extend(reached(found, where))
        return found

    def _callable(self, text: str, where: str, declared: object) -> Callable[..., object]:
        """Return a function, or a class itself; of es_cookbook only if it is in `FUNCTIONS`."""
        if not may_be_called(declared):
            raise ConfigError(
                f"{where}: a class or a function itself may stand only where the type asks for "
                f"one, and it is {type_name(declared)}"
            )
        found = self._resolved(text, where)
        # Its real name: a trusted package may have imported something of es_cookbook.
        name = f"{found.__module__}:{found.__qualname__}"
        if is_own(name) and name not in self.trust and name not in FUNCTIONS.values():
            raise ConfigError(
                f"{where}: {text!r:.200} is es_cookbook's own; a config from a file names "
                "functions, and classes themselves, of the packages and scripts in trust= alone"
            )
        return found

    def _resolved(self, text: str, where: str) -> Callable[..., object]:
        """Return the object of a name; the user trusts what is installed and registered."""
        trust = [*self.trust, *([text.partition(":")[0]] if parts_of(text) else [])]
        with _at(where):
            return resolve(text, trust)


@contextlib.contextmanager
def _at(where: object) -> Generator[None]:
    """Turn errors in a value or a file into a `ConfigError` that says where it is."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, OSError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{where}: {printable(said)[:_LONGEST_LINE]}") from error
