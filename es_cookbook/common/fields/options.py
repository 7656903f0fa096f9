"""The options of a config: what a user types for each field, and for the fields of its parts.

`options_of` lists those of a config class, or of a blueprint in which parts are chosen: dotted
paths, and the text of each value. Where a field is a tuple of parts, an item's number stands in the
path: `parts.0.weight`. Options may be in a YAML file too, with dots or nested:

    recipe: arithmetic
    learning_rate: 3e-4
    engine.num_lanes: 2
    dataset:
      num_train: 1000

A list is its items with commas, or, of parts, with their numbers in the paths. Values are taken as
they are written (`1e-3`, `007`, `None`).

Left out: fields that hold a function and no name stands for one. They are for configs in Python.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import cast

import chz

from es_cookbook.common.errors import ConfigError, ESCookbookError
from es_cookbook.common.fields.chz_fields import (
    MISSING,
    SpecialArg,
    doc_of,
    is_plain,
    type_name,
    walked,
)
from es_cookbook.common.fields.declared_types import may_be_called
from es_cookbook.common.files import LARGEST_CONFIG, read_file


class OptionError(ESCookbookError):
    """An option that is not one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option of a config.

    Attributes:
        path: its name, with dots.
        doc: its line of documentation.
        value: what a user would type for the value that it has now; None if it must be given.
        part: the chz class that it holds now, whose fields are options too.
        type: as the field declares it.
        names: what a user may type for a part -> "module:Class".
    """

    path: str
    doc: str
    value: str | None
    part: type | None
    type: object
    names: Mapping[str, str]

    @property
    def choices(self) -> Sequence[str]:
        """The words that it accepts, if they can be listed."""
        is_literal = typing.get_origin(self.type) is typing.Literal
        return [*self.names] or [str(v) for v in typing.get_args(self.type) if is_literal]

    @property
    def accepts(self) -> str:
        """What it accepts, in brackets on the help page."""
        return "|".join(self.choices) or (
            "True|False" if self.type is bool else type_name(self.type)
        )


def options_of(config: "type | chz.Blueprint[object]") -> dict[str, Option]:
    """The options of a config class or of a blueprint, and of the parts that it has, by path.

    Raises:
        InvalidBlueprintArg: A value that was applied to the blueprint is not one of its field.
    """
    found: dict[str, Option] = {}
    for param in walked(chz.Blueprint(config) if isinstance(config, type) else config):
        is_for_python = is_plain(param.meta_factory) and may_be_called(param.type)
        if param.name.isdecimal() or is_for_python:
            continue
        part, names = class_of(param.spec), getattr(param.meta_factory, "accepted", {})
        found[param.path] = Option(
            path=param.path,
            doc=doc_of(class_of(param.whole), param.name),
            value=_typed(param.spec, part, names),
            part=part,
            type=param.type,
            names=names,
        )
    return found


def class_of(spec: object) -> type | None:
    """The chz class of an object, or that a class or a partial of it builds."""
    found = cast("functools.partial[object]", spec).func if _is_partial(spec) else spec
    if not chz.is_chz(found):
        return None
    return found if isinstance(found, type) else type(found)


def _is_partial(spec: object) -> bool:
    return isinstance(spec, functools.partial)


def _typed(spec: object, part: type | None, names: Mapping[str, str]) -> str | None:
    if part is not None:
        by_target = {target: name for name, target in names.items()}
        return by_target.get(f"{part.__module__}:{part.__qualname__}", part.__name__)
    if isinstance(spec, SpecialArg):
        return str(getattr(spec, "value", spec))
    return None if spec is MISSING else as_typed(spec)


def as_typed(value: object) -> str:
    """A value as a user would type it."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return ",".join(as_typed(item) for item in cast("Sequence[object]", value))
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)


def options_in(path: Path) -> dict[str, str]:
    """The options of a YAML file, by path.

    Raises:
        ConfigError: It cannot be read, or holds something else than options.
    """
    import yaml

    try:
        text = read_file(path, LARGEST_CONFIG, None).decode("utf-8")
        # The base loader leaves every value as it is written, and makes nothing but text.
        return dict(_flat("", yaml.BaseLoader(text).get_single_data()))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"config={path} cannot be read: {said}") from error


def _flat(name: str, plain: object) -> Iterator[tuple[str, str]]:
    if isinstance(plain, list) and plain and not isinstance(plain[0], str):
        plain = dict(enumerate(cast("list[object]", plain)))
    if isinstance(plain, dict):
        for key, value in cast("dict[object, object]", plain).items():
            yield from _flat(f"{name}.{key}" if name else str(key), value)
    elif not name or (isinstance(plain, list) and not all(isinstance(i, str) for i in plain)):
        raise ConfigError(f"{name or 'it'} must hold options, each as NAME: VALUE in a line")
    else:
        yield name, as_typed(plain)
