"""The options of a config: what a user types for each field, and for the fields of its parts.

`each_option` walks a config class, or a config, as the command line sees it: dotted paths, and the
texts of the values that hold now. Where a field is a tuple of parts, an item's number stands in the
path: `parts.0.weight`. `options_for` goes the other way: the options that make a config of its
class. Options may be in files too, in YAML or TOML, with dots or nested:

    recipe: arithmetic
    learning_rate: 3e-4
    engine: torch
    engine.num_lanes: 2
    dataset:
      num_train: 1000

is `recipe=arithmetic learning_rate=3e-4 engine=torch engine.num_lanes=2 dataset.num_train=1000`. A
list is its items with commas, or, of parts, with their numbers in the paths. Values are taken as
they are written (`1e-3`, `007`, `no`), and null is None.

Left out: fields that hold a function and no name stands for one. They are for configs in Python.
"""

import dataclasses
import functools
import inspect
import math
import re
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType
from typing import cast

import chz
import chz.factories

from es_cookbook.common.errors import ConfigError, ESCookbookError
from es_cookbook.common.fields.chz_fields import (
    MISSING,
    CastError,
    Field,
    default_of,
    doc_of,
    type_name,
)
from es_cookbook.common.fields.declared_types import may_be_called
from es_cookbook.common.files import LARGEST_CONFIG, read_file

ITEMS = "items"
"""Metadata of a field of several parts: their fields that a list of names stands for."""
_FILE = "config="


class OptionError(ESCookbookError):
    """An option that is not one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option of a config.

    `value` is what a user would type for the value that it has now, None when it must be given;
    `part` says whether that is the name of a class with options of its own.
    """

    path: str
    field: Field
    doc: str
    value: str | None
    part: bool

    @property
    def accepts(self) -> str:
        """What it accepts, in brackets on the help page."""
        if names := names_of(self.field):
            return "|".join(names)
        if literals := literals_of(self.field):
            return "|".join(literals)
        if self.field.x_type is bool:
            return "True|False"
        return type_name(self.field.x_type)


def options_of(config_class: type) -> list[Option]:
    """The options of a config class and of the parts that it has by default, in order."""
    return list(each_option(config_class, "", {}, {}))


def is_inside(path: str, given: Mapping[str, str]) -> bool:
    """Whether an option inside this one is given."""
    return any(key.startswith(path + ".") for key in given)


def values_of(config: object) -> dict[str, object]:
    return {name: getattr(config, field.x_name) for name, field in chz.chz_fields(config).items()}


def each_option(
    config_class: type,
    prefix: str,
    given: Mapping[str, str],
    values: Mapping[str, object],
    kept: bool = False,
) -> Iterator[Option]:
    """All options of a config class and of the parts that it now has, in order.

    `values` are those that may differ from the class's own defaults; `kept` says whether a part of
    them stays when options inside of it change.
    """
    for name, field in chz.chz_fields(config_class).items():
        if _is_for_python(field):
            continue
        path, doc = prefix + name, doc_of(config_class, name)
        value = values[name] if name in values else default_of(field)
        text = given.get(path, None if value is MISSING else as_typed(value))
        if item := _item_of(field):
            inside = (key for key in given if key.startswith(f"{path}."))
            first = (key.removeprefix(f"{path}.").partition(".")[0] for key in inside)
            numbers = {int(each) for each in first if each.isdecimal()}
            if path in given or not numbers:
                yield Option(path, field, doc, text, part=False)
            for i in range(len(numbers)):
                yield from each_option(item, f"{path}.{i}.", given, {}, kept)
            continue
        part, part_values = part_of(field, path, given, value, kept)
        if part is None:
            yield Option(path, field, doc, text, part=False)
        else:
            yield Option(path, field, doc, name_of(field, part), part=True)
            yield from each_option(part, path + ".", given, part_values, kept)


def spelled_out(
    config_class: type, given: Mapping[str, str], values: Mapping[str, object], kept: bool
) -> dict[str, str]:
    """Options with those of every part, where a list of names stands for several: `parts=a,b`."""
    for option in each_option(config_class, "", given, values, kept):
        names = given.get(option.path)
        if names and (fields := (option.field.metadata or {}).get(ITEMS)):
            of_items = {
                f"{option.path}.{i}.{field}": name
                for i, name in enumerate(names.split(","))
                for field in fields
            }
            others = {path: text for path, text in given.items() if path != option.path}
            return spelled_out(config_class, {**of_items, **others}, values, kept)
    return dict(given)


def _is_for_python(field: Field) -> bool:
    """Whether it holds a function or a class for which no name stands."""
    is_plain = type(field.meta_factory) in (NoneType, chz.factories.standard)
    return is_plain and may_be_called(field.x_type)


def _item_of(field: Field) -> type | None:
    """What a field holds several of, if those are parts with options of their own."""
    item = next(iter(typing.get_args(field.x_type)), None)
    is_tuple = typing.get_origin(field.x_type) is tuple
    return cast(type, item) if is_tuple and chz.is_chz(item) else None


def part_at(config: object, path: str) -> object:
    """The part at a dotted path."""
    for name in path.split("."):
        config = config[int(name)] if isinstance(config, tuple) else getattr(config, name)
    return config


def options_for(config: object) -> dict[str, object]:
    """The options that make a config of its class: those that are no defaults, by path.

    Numbers, texts, True, False and None stand for themselves, a list for its items, and any other
    value for the text that a user would type.
    """
    return dict(_differing(config, "", {}))


def _differing(
    part: object, prefix: str, defaults: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    for name, field in chz.chz_fields(cast("type", part)).items():
        path, value = prefix + name, getattr(part, field.x_name)
        default = defaults[name] if name in defaults else default_of(field)
        if value == default:
            continue
        if _item_of(field):
            for i, item in enumerate(cast("tuple[object, ...]", value)):
                yield from _differing(item, f"{path}.{i}.", {})
        elif not chz.is_chz(value) or isinstance(value, type):
            yield path, _plain(value)
        else:
            start: Mapping[str, object] = values_of(default) if chz.is_chz(default) else {}
            if type(default) is not type(value):
                chosen = _chosen_by(field, type(value))
                yield path, chosen
                _, start = part_of(field, path, {path: str(chosen)}, MISSING, kept=False)
            yield from _differing(value, f"{path}.", start)


def _chosen_by(field: Field, part: type) -> str | bool:
    """What a user would type for a part."""
    if switched_on(field, "True") is part:
        return True
    name = name_of(field, part)
    return name if name in names_of(field) else as_typed(part)


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or is_number else as_typed(value)


def part_of(
    field: Field, path: str, given: Mapping[str, str], value: object, kept: bool
) -> tuple[type | None, Mapping[str, object]]:
    """The chz class that a field holds now, and where it differs from that class's defaults."""
    meta_factory = field.meta_factory
    factory: object = None
    if path in given:
        factory = _chosen(field, path, given[path])
    elif chz.is_chz(value) and (kept or not is_inside(path, given)):
        return type(value), values_of(value)
    elif meta_factory is not None and (value is MISSING or is_inside(path, given)):
        factory = meta_factory.unspecified_factory()
    settings: Mapping[str, object] = {}
    if isinstance(factory, functools.partial):
        bound = cast("functools.partial[object]", factory)
        factory, settings = bound.func, bound.keywords
    is_part = isinstance(factory, type) and chz.is_chz(factory) and not inspect.isabstract(factory)
    return (cast(type, factory), settings) if is_part else (None, {})


def _chosen(field: Field, path: str, text: str) -> Callable[..., object] | None:
    """What a user's word builds; None where it is a value itself."""
    if part := switched_on(field, text):
        return part
    meta_factory = field.meta_factory
    kinds = typing.get_args(field.x_type) or (field.x_type,)
    if meta_factory and (names_of(field) or any(map(chz.is_chz, kinds))):
        try:
            meta_factory.perform_cast(text)
        except CastError:
            try:
                return meta_factory.from_string(text)
            except (chz.factories.MetaFromString, ConfigError) as error:
                said = str(error)
                if type(None) in kinds and not names_of(field):
                    said = f"accepted: True, None, or options of it, {path}.NAME=..."
                raise OptionError(f"{path}={text}: {said}") from error
    return None


def switched_on(field: Field, text: str) -> Callable[..., object] | None:
    """What True builds where a part may be left out: the part with its own defaults."""
    kinds = typing.get_args(field.x_type)
    if text not in ("True", "true") or type(None) not in kinds or not any(map(chz.is_chz, kinds)):
        return None
    return field.meta_factory.unspecified_factory() if field.meta_factory else None


def literals_of(field: Field) -> list[str]:
    """The values of a field that is typed as a `Literal`."""
    is_literal = typing.get_origin(field.x_type) is typing.Literal
    return [str(value) for value in typing.get_args(field.x_type)] if is_literal else []


def names_of(field: Field) -> Mapping[str, str]:
    """What a user may type for a part, if that has `Names` -> "module:Class"; the default first."""
    named: Mapping[str, str] = getattr(field.meta_factory, "accepted", {})
    default = getattr(field.meta_factory, "default", None)
    return dict(sorted(named.items(), key=lambda item: item[0] != default))


def name_of(field: Field, part: type) -> str:
    targets = {target: name for name, target in names_of(field).items()}
    return targets.get(f"{part.__module__}:{part.__qualname__}", part.__name__)


def as_typed(value: object) -> str:
    """A value as a user would type it."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return ",".join(as_typed(item) for item in cast("Sequence[object]", value))
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)


def joined(words: Sequence[str]) -> list[str]:
    """`--name value`, as other programs have it, as `name=value`.

    >>> joined(["--seed", "1", "--sampling.max-tokens", "8", "runs/mine", "--help"])
    ['seed=1', 'sampling.max_tokens=8', 'runs/mine', '--help']
    >>> joined(["--seed=1", "--prompt", "Q: {question} =", "--profile", "data=rows.jsonl"])
    ['--seed=1', 'prompt=Q: {question} =', '--profile', 'data=rows.jsonl']
    """
    found: list[str] = []
    left = list(reversed(words))
    while left:
        word = left.pop()
        is_value = bool(left) and not re.match(r"--[A-Za-z]|[A-Za-z_][\w.]*=", left[-1])
        if re.fullmatch(r"--[A-Za-z][\w.-]*", word) and word != "--help" and is_value:
            word = f"{word.removeprefix('--').replace('-', '_')}={left.pop()}"
        found.append(word)
    return found


def expanded(words: Sequence[str]) -> list[str]:
    """With the options of each `config=FILE` before all others.

    Raises:
        ConfigError: A file cannot be read as options.
    """
    words = joined(words)
    named = [each for each in words if each.lstrip("-").startswith(_FILE)]
    files = [Path(each.lstrip("-").removeprefix(_FILE)) for each in named]
    of_files = [option for path in files for option in options_in(path)]
    return [*of_files, *(each for each in words if each not in named)]


def options_in(path: Path) -> list[str]:
    """The options of a YAML or TOML file, name=value each; nothing in it is called or repeated.

    Raises:
        ConfigError: There is no such file, it is neither, or it holds something else than options.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(f"config={path} must be a .yaml or a .toml file of options")
    try:
        text = read_file(path, LARGEST_CONFIG, None).decode("utf-8")
        found = dict(flat(reader(text), ""))
    except OSError as error:
        raise ConfigError(f"config={path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"config={path} is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"config={path}: {' '.join(str(error).split())}") from error
    if "config" in found:
        raise ConfigError(f"config={path}: a file of options names no other one, found config")
    return [f"{name}={value}" for name, value in found.items()]


def of_yaml(text: str) -> object:
    import yaml

    def plain(node: yaml.Node) -> object:
        if id(node) in seen:
            raise ConfigError("a value must not stand for another one (& and *)")
        seen.add(id(node))
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind not in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp"):
            raise ConfigError(f"the tag !!{kind:.60} is not for options")
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            return "None" if kind == "null" else str(node.value)  # As it is written: 1e-3, 007.
        found: dict[object, object] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("options have names, found a list or a mapping in place of one")
            if (key := str(key_node.value)) in found:
                raise ConfigError(
                    f"{key} is there twice, again in line {key_node.start_mark.line + 1}"
                )
            found[key] = plain(value)
        return found

    seen = set[int]()
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"it cannot be read as YAML: {error}") from error
    return None if node is None else plain(node)


def _of_toml(text: str) -> object:
    try:
        return tomllib.loads(text, parse_float=str)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it cannot be read as TOML: {error}") from error


_READERS = {".yaml": of_yaml, ".yml": of_yaml, ".toml": _of_toml}


def flat(plain: object, name: str) -> Iterator[tuple[str, str]]:
    """Options by whole names; an item of a list of parts has its number in its name."""
    items = cast("list[object]", plain) if isinstance(plain, list) else []
    if isinstance(plain, dict) or any(isinstance(item, dict) for item in items):
        inside = dict(enumerate(items)) if items else cast("dict[object, object]", plain)
        found: dict[str, str] = {}
        for key, value in inside.items():
            if not re.fullmatch(r"[\w.-]+", str(key)):
                raise ConfigError(f"options have names, found {key!r:.60}")
            for path, text in flat(value, f"{name}.{key}" if name else str(key)):
                if path in found:
                    raise ConfigError(f"{path} is there twice, with and without dots")
                found[path] = text
        yield from found.items()
    elif not name:
        raise ConfigError(
            "it must hold options, `name: value` in each line, found "
            f"{'nothing' if plain is None else type(plain).__name__}"
        )
    elif isinstance(plain, list):
        texts = [_text(name, item) for item in items]
        if any("," in text for text in texts):
            raise ConfigError(f"{name}: no item of a list can have a comma")
        yield name, ",".join(texts)
    else:
        yield name, _text(name, plain)


def _text(name: str, value: object) -> str:
    if isinstance(value, bool | int | str):
        return str(value)
    raise ConfigError(
        f"{name} must be text, a number, true, false or null, or a list of them, found "
        f"{type(value).__name__}"
    )
