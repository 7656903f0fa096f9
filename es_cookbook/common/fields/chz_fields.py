"""What configs need of chz 0.4 that chz does not publish; pyproject bounds chz for it."""

import dataclasses
import re
import typing
from collections.abc import Iterator
from types import NoneType

import chz
import chz.factories
from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
from chz.blueprint._blueprint import SpecialArg
from chz.field import Field
from chz.tiepin import CastError, is_subtype_instance, type_repr
from chz.util import MISSING

# pyright: reportPrivateUsage=false

__all__ = [
    "CHZ_ERRORS",
    "MISSING",
    "CastError",
    "InvalidBlueprintArg",
    "SpecialArg",
    "is_subtype_instance",
]

CHZ_ERRORS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
"""What chz raises about options."""
_ARGUMENT = re.compile(r" \(when evaluating argument '(\w+)' for .*\)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a blueprint.

    Attributes:
        path: its name, with dots.
        name: the last part of it.
        type: as the field declares it.
        meta_factory: of the field.
        spec: the value that it has now, or the class or the factory of that; MISSING: neither.
        whole: the spec of the part that it is a field of.
    """

    path: str
    name: str
    type: object
    meta_factory: chz.factories.MetaFactory | None
    spec: object
    whole: object


def walked(blueprint: "chz.Blueprint[object]") -> Iterator[Param]:
    """The parameters of a blueprint and of the parts that it has now, in order.

    Raises:
        InvalidBlueprintArg: A value that was applied is not one of its field.
    """
    made = blueprint._make_lazy()
    specs: dict[str, object] = {"": blueprint.target}
    for path, param in made.all_params.items():
        parent = path.rpartition(".")[0]
        if not path or parent not in specs:  # The whole, or of a part that is left out.
            continue
        whole, given = specs[parent], blueprint._arg_map.get_kv(path)
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
        yield Param(path, param.name, param.type, param.meta_factory, spec, whole)


def all_paths(blueprint: "chz.Blueprint[object]") -> list[str]:
    """The names of all parameters, of parts that are left out too."""
    return [path for path in blueprint._make_lazy().all_params if path]


def is_plain(meta_factory: chz.factories.MetaFactory | None) -> bool:
    """Whether a field has no other names for its values than chz's own."""
    return type(meta_factory) in (NoneType, chz.factories.standard)


def path_of_failure(error: BaseException) -> str:
    """Which option's part chz was building when its class refused: "optimizer"; "" for the whole.

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


def doc_of(config_class: type | None, name: str) -> str:
    """What a field's class says about it; where a subclass has only another default, its base."""
    bases = config_class.__mro__ if config_class else ()
    fields = (vars(each).get("__chz_fields__", {}).get(name) for each in bases)
    return next((field._doc for field in fields if field and field._doc), "")


def is_required(field: Field) -> bool:
    """Whether a field has no default."""
    return field._default is MISSING and field._default_factory is MISSING
