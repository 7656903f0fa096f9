"""Configs as text, and the names a user types for the parts of a config.

A Config is a chz object all the way down: other chz objects, `functools.partial`s and names of
importable functions, tuples, lists, dicts, numbers, strings, paths, None. `config_to_json` writes
it out in full, defaults included, so that a later change of a default does not change an old run;
`config_from_json` rebuilds the identical object. Classes and functions are written as
"module:qualname" and imported again; nothing is ever pickled or evaluated.

`Names` lets a user write `engine=vllm` as well as `engine=VLLMEngineBuilder`, and imports a part
only when it is chosen. The command line around it is `es_cookbook.common.cli`.
"""

import functools
import importlib
import json
import math
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

import chz
import chz.factories

from es_cookbook.common.chz_fields import CastError
from es_cookbook.common.errors import ConfigError, did_you_mean, nearest

_Loaded = TypeVar("_Loaded")
_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


def config_to_json(config: object) -> str:
    """The whole config as indented JSON, every default written out.

    Raises:
        ConfigError: A value that cannot be rebuilt from text, for example a lambda; names the
            field.
    """
    return json.dumps(_to_plain(config, "config"), indent=2, ensure_ascii=False, allow_nan=False)


def config_from_json(text: str) -> object:
    """Rebuild the object that `config_to_json` wrote.

    A field that a class has gained since takes its default; a field it has lost is refused, unless
    it has the value that is how the class behaves now.

    Raises:
        ConfigError: Not such JSON, an unknown class or function, an unknown or missing field, or a
            value that the class itself refuses.
    """
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"a config must be JSON, found a mistake at {error}") from error
    return _from_plain(plain, "config")


_MOVED = {
    "es_cookbook.engines.ray_pool": "es_cookbook.engines.ray.pool",
    "es_cookbook.engines.torch_engine": "es_cookbook.engines.torch.engine",
    "es_cookbook.engines.vllm_engine": "es_cookbook.engines.vllm.engine",
    "es_cookbook.evolution.optimizers.genetic": "es_cookbook.evolution.optimizers.genetic.genetic",
    "es_cookbook.runs.background_push": "es_cookbook.runs.hub.background_push",
}
"""Where modules are now whose classes recorded configs name by an earlier place."""
_DROPPED: Mapping[str, Mapping[str, object]] = {
    "es_cookbook.evolution.optimizers.genetic.genetic:Genetic": {"antithetic": False},
}
"""Fields that a class no longer has, each with the value that is how the class behaves now."""


def load_config(path: Path, config_class: type[_Loaded]) -> _Loaded:
    """Read a config file that must hold a `config_class`.

    Raises:
        ConfigError: As `config_from_json`, or another class; names the file.
    """
    config = _at(path, config_from_json, path.read_text(encoding="utf-8"))
    if not isinstance(config, config_class):
        raise ConfigError(
            f"{path} must hold a {config_class.__name__}, found a {type(config).__name__}"
        )
    return config


def reference(thing: Callable[..., object]) -> str:
    """The "module:qualname" of an importable class or function; also what `resolve` takes.

    >>> reference(json.JSONDecoder)
    'json.decoder:JSONDecoder'

    Raises:
        ConfigError: A lambda, a local or anything else that importing does not give back.
    """
    module = getattr(thing, "__module__", None)
    if module == "__main__":
        module = _module_that_was_run() or module
    text = f"{module}:{getattr(thing, '__qualname__', None)}"
    try:
        found = resolve(text)
    except ConfigError:
        found = None
    if found is not thing:
        raise ConfigError(
            f"{thing!r} cannot be written to a config because it cannot be imported again; "
            "define it by name at the top level of a module"
        )
    return text


def resolve(text: str) -> Callable[..., object]:
    """Import what "module:qualname" names.

    Raises:
        ConfigError: No such module, or nothing callable of that name in it; names the nearest.
    """
    module_name, _, qualname = text.partition(":")
    module_name = _MOVED.get(module_name, module_name)
    if not module_name or not qualname:
        raise ConfigError(f"a class or function is written as module:name, found {text!r}")
    if module_name == _module_that_was_run():  # Importing it again would make second classes.
        module_name = "__main__"
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{text} cannot be imported: {error}") from error
    for part in qualname.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found))
            raise ConfigError(f"{module_name} has nothing called {qualname}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{text} must be a class or a function, found {type(found).__name__}")
    return found


def _module_that_was_run() -> str | None:
    """The real name of `__main__`, where it was run with `python -m`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else spec.name


class Names(chz.factories.MetaFactory):
    """The names by which a user chooses a part of a config.

    Beside the names, the class's own name, any subclass that is already defined, and "module:Class"
    are accepted. Only what is chosen is imported, so a name may point to a module that needs an
    optional package. A field has it as its `meta_factory`, and `build_default` as its
    `default_factory`.

    Args:
        accepted: name -> "module:Class".
        default: which of the names is meant when none is given, or None for none.
        settings: name -> fields in which that choice differs from its class's own defaults; they
            hold on the command line and for `build_default` alike.
    """

    def __init__(
        self,
        accepted: Mapping[str, str],
        default: str | None,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        super().__init__()
        self._settings = dict(settings or {})
        if default is not None and default not in accepted:
            raise ValueError(f"unknown default {default!r}: {nearest(default, accepted)}")
        for name in self._settings:
            if name not in accepted:
                raise ValueError(f"settings of unknown {name!r}: {nearest(name, accepted)}")
        self.accepted = dict(accepted)
        self.default = default

    def build_default(self) -> object:
        """The default part itself, for `chz.field(default_factory=...)`."""
        factory = self.unspecified_factory()
        return None if factory is None else factory()

    def unspecified_factory(self) -> Callable[..., object] | None:
        """What chz builds when nothing, or only fields of the part, are given."""
        return None if self.default is None else self._load(self.default)

    def from_string(self, factory: str) -> Callable[..., object]:
        """The class (or partial of it) that a user's word stands for.

        Raises:
            MetaFromString: None of that name; lists what is accepted, the nearest first.
            ConfigError: It is known but cannot be imported.
        """
        for name, target in self.accepted.items():
            if factory in (name, target, target.partition(":")[2]):
                return self._load(name)
        standard = chz.factories.standard(
            annotation=self.field_annotation, default_module=self.field_module
        )
        try:
            return cast(Callable[..., object], standard.from_string(factory))
        except chz.factories.MetaFromString as error:
            hint = str(error) if ":" in factory else nearest(factory, self.accepted)
            raise chz.factories.MetaFromString(f"unknown name {factory!r}: {hint}") from error

    def perform_cast(self, value: str) -> object:
        """Nothing but None, where the field may be None, is a value rather than a name."""
        optional = type(None) in typing.get_args(self.field_annotation)
        if optional and value in ("None", "none") and value not in self.accepted:
            return None
        raise CastError(f"{value!r} is a name")

    def _load(self, name: str) -> Callable[..., object]:
        loaded = resolve(self.accepted[name])
        settings = self._settings.get(name)
        return functools.partial(loaded, **settings) if settings else loaded


def _to_plain(value: object, where: str) -> object:
    """JSON's own types, with a "$..." key for everything that JSON has no word for."""
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
            name: _to_plain(getattr(value, field.x_name), f"{where}.{name}")
            for name, field in chz.chz_fields(value).items()
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


def _from_plain(plain: object, where: str) -> object:
    """Undo `_to_plain`."""
    if isinstance(plain, list):
        items = cast("list[object]", plain)
        return [_from_plain(item, f"{where}[{i}]") for i, item in enumerate(items)]
    if not isinstance(plain, dict):
        return plain
    entries = cast("dict[str, object]", plain)
    marker = next((key for key in entries if key.startswith("$")), None)
    match marker, entries.get(marker or ""):
        case None, _:
            return {key: _from_plain(item, f"{where}[{key!r}]") for key, item in entries.items()}
        case "$class", str(text):
            fields = {key: item for key, item in entries.items() if key != "$class"}
            return _build(text, fields, where)
        case "$partial", str(text):
            args = cast("list[object]", _from_plain(entries.get("args", []), where))
            keywords = cast("dict[str, object]", _from_plain(entries.get("keywords", {}), where))
            return functools.partial(_at(where, resolve, text), *args, **keywords)
        case "$import", str(text):
            return _at(where, resolve, text)
        case "$tuple", list(items):
            return tuple(cast("list[object]", _from_plain(items, where)))
        case "$dict", list(items):
            pairs = cast("list[tuple[object, object]]", _from_plain(items, where))
            return dict(pairs)
        case "$path", str(text):
            return Path(text)
        case "$float", str(text) if text in ("inf", "-inf", "nan"):
            return float(text)
        case _:
            raise ConfigError(
                f"{where}: {marker} is not how a config is written; accepted: $class, $partial, "
                "$import, $tuple, $dict, $path, $float, each with its own kind of value"
            )


def _build(text: str, plain_fields: Mapping[str, object], where: str) -> object:
    config_class = _at(where, resolve, text)
    if not (isinstance(config_class, type) and chz.is_chz(config_class)):
        raise ConfigError(f"{where}: {text} is not a chz class")
    known = chz.chz_fields(config_class)
    dropped = _DROPPED.get(f"{config_class.__module__}:{config_class.__qualname__}", {})
    for name in dropped.keys() & plain_fields.keys():
        if plain_fields[name] != dropped[name]:
            raise ConfigError(
                f"{where}: {config_class.__name__} no longer has the option {name}, so it can only "
                f"be {dropped[name]!r}; found {plain_fields[name]!r}"
            )
    plain_fields = {name: item for name, item in plain_fields.items() if name not in dropped}
    for name in plain_fields:
        if name not in known:
            raise ConfigError(
                f"{where}: {config_class.__name__} has no field {name!r}: {nearest(name, known)}"
            )
    fields = {name: _from_plain(item, f"{where}.{name}") for name, item in plain_fields.items()}
    try:
        return config_class(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _at(where: object, function: Callable[[_Given], _Found], given: _Given) -> _Found:
    """What the function returns; its `ConfigError` says where."""
    try:
        return function(given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
