"""The fields of chz classes: their types, their documentation, and the options that set them.

`options_of` lists the options of a config class, or of a blueprint in which parts are chosen:
dotted paths, and the text of each value. If a field is a tuple of parts, an item's number is in the
path: `parts.0.weight`. Options may be in a YAML file too, with dots or nested:

    recipe: arithmetic
    learning_rate: 3e-4
    engine.num_lanes: 2
    dataset:
      num_train: 1000

A list is its items with commas or, for parts, with their numbers in the paths. Values are taken as
they are written (`1e-3`, `007`, `None`).

Some of this uses what chz 0.4 does not publish; pyproject.toml bounds chz for it.

Left out: options for fields that hold a function, unless a name stands for it.
"""

import collections.abc
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Any, cast

import chz
import chz.factories
from chz.blueprint._blueprint import SpecialArg
from chz.blueprint._entrypoint import EntrypointException
from chz.field import Field
from chz.tiepin import CastError, is_subtype_instance, type_repr
from chz.util import MISSING

from es_cookbook.common.errors import ConfigError, ESCookbookError
from es_cookbook.common.files import LARGEST_CONFIG, read_file

# pyright: reportPrivateUsage=false

__all__ = ["CastError", "EntrypointException", "Field"]

NOT_RECORDED = "not_recorded_while_none"
"""Metadata of a field that a config file lacks while it is None."""
_CONTAINERS = (typing.Union, UnionType, tuple, list, dict, collections.abc.Mapping)
_ARGUMENT = re.compile(r" \(when evaluating argument '(\w+)' for .*\)", re.DOTALL)


class OptionError(ESCookbookError):
    """An option that does not exist, or has a value that its field cannot have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option of a config.

    Attributes:
        path: its name, with dots.
        doc: its line of documentation.
        value: its current value, as a user would type it; None if it must be given.
        part: the chz class that it holds now, whose fields are options too.
        type: as the field declares it.
        names: names that users may type for a part -> "module:Class".
        optional: the name that stands for the part if only fields of it are given, for a part that
            is None by default; None for all others.
    """

    path: str
    doc: str
    value: str | None
    part: type | None
    type: object
    names: Mapping[str, str]
    optional: str | None

    @property
    def choices(self) -> Sequence[str]:
        """The words that it accepts, if they can be listed."""
        is_literal = typing.get_origin(self.type) is typing.Literal
        return [*self.names] or [str(v) for v in typing.get_args(self.type) if is_literal]

    @property
    def accepts(self) -> str:
        """Accepted values, shown in brackets on the help page."""
        return "|".join(self.choices) or (
            "True|False" if self.type is bool else type_name(self.type)
        )


def options_of(config: "type | chz.Blueprint[object]") -> dict[str, Option]:
    """The options of a config class or of a blueprint, and of the parts that it has, by path.

    Raises:
        InvalidBlueprintArg: A field cannot have a value that was applied to the blueprint.
    """
    blueprint = chz.Blueprint[object](config) if isinstance(config, type) else config
    made = blueprint._make_lazy()
    found: dict[str, Option] = {}
    specs: dict[str, object] = {"": blueprint.target}
    for path, param in made.all_params.items():
        parent = path.rpartition(".")[0]
        if not path or parent not in specs:  # The whole, or of a part that is left out.
            continue
        whole, given, factory = specs[parent], blueprint._arg_map.get_kv(path), param.meta_factory
        if path in made.meta_factory_value:
            spec = specs[path] = made.meta_factory_value[path]
        elif given is not None:
            spec = given.value
        elif chz.is_chz(whole) and not isinstance(whole, type):  # chz does not look into defaults.
            spec = getattr(whole, param.name, MISSING)
        else:
            spec = param.default.instantiate() if param.default else MISSING
        if chz.is_chz(spec):
            specs[path] = spec
        is_plain = type(factory) in (NoneType, chz.factories.standard)
        if not param.name.isdecimal() and not (is_plain and may_be_called(param.type)):
            names = getattr(factory, "accepted", {})
            is_optional = getattr(factory, "is_optional", False)
            found[path] = Option(
                path=path,
                doc=_doc_of(class_of(whole), param.name),
                value=_typed(spec, names),
                part=class_of(spec),
                type=param.type,
                names=names,
                optional=getattr(factory, "default", None) if is_optional else None,
            )
    return found


def class_of(spec: object) -> type | None:
    """The chz class of an object, or that a class or a partial of it builds."""
    is_partial = isinstance(spec, functools.partial)
    found = cast("functools.partial[object]", spec).func if is_partial else spec
    if not chz.is_chz(found):
        return None
    return found if isinstance(found, type) else type(found)


def path_of_failure(error: BaseException) -> str:
    """Path of the part that chz was building when its class refused, "optimizer"; "" for the whole.

    chz notes each argument that it was about to evaluate, the innermost first.
    """
    notes = map(_ARGUMENT.fullmatch, getattr(error, "__notes__", ()))
    return ".".join(reversed([note[1] for note in notes if note]))


def type_name(of_type: object) -> str:
    """A type as its author wrote it, without the modules of its classes.

    >>> type_name(tuple[re.Pattern, ...] | None)
    'tuple[Pattern, ...] | None'
    >>> type_name(int | typing.Literal["exact"] | None)
    "int | 'exact' | None"
    """
    if typing.get_origin(of_type) is typing.Union:  # A Literal is among them.
        return " | ".join(map(type_name, typing.get_args(of_type)))
    if typing.get_origin(of_type) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(of_type)))
    if of_type is NoneType:
        return "None"
    return re.sub(r"[\w.]+[.:](?=\w)", "", type_repr(of_type))


def fits(value: object, declared: object) -> bool:
    """Whether a value from a file is of a type, as chz checks it; True is not a number.

    >>> fits((1, 2), tuple[int, ...]), fits(1, float | None), fits(True, int)
    (True, True, False)
    """
    if isinstance(value, bool):
        accepted = (each for arm in _arms(declared) for each in (arm, *typing.get_args(arm)))
        return any(each in (bool, object, Any) or each is value for each in accepted)
    if callable(value) and any(_origin(arm) is collections.abc.Callable for arm in _arms(declared)):
        return True  # chz takes no function that returns a union.
    return is_subtype_instance(value, cast(Any, declared))


def may_be_called(declared: object) -> bool:
    """Whether a class or a function itself is a value, and not only an object; not for `Any`."""
    return any(_origin(arm) in (collections.abc.Callable, type) for arm in _arms(declared))


def _arms(declared: object) -> Iterator[object]:
    """The types of accepted values: members of unions, and items of containers."""
    if _origin(declared) in _CONTAINERS:
        for inner in typing.get_args(declared) or (object,):
            yield from _arms(inner)
    else:
        yield declared


def _origin(declared: object) -> Any:  # noqa: ANN401
    return typing.get_origin(declared) or declared


def _doc_of(config_class: type | None, name: str) -> str:
    """Doc of a field, from its class; if a subclass only changes the default, from its base."""
    bases = config_class.__mro__ if config_class else ()
    fields = (vars(each).get("__chz_fields__", {}).get(name) for each in bases)
    return next((field._doc for field in fields if field and field._doc), "")


def _typed(spec: object, names: Mapping[str, str]) -> str | None:
    if (part := class_of(spec)) is not None:
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
        ConfigError: It cannot be read, or holds something other than options.
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
