"""What configs need of chz 0.4 that chz does not publish; pyproject bounds chz for it."""

import re
import typing
from types import NoneType
from typing import cast

from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
    Reference,
)
from chz.field import Field
from chz.tiepin import CastError, is_subtype, is_subtype_instance, type_repr
from chz.util import MISSING

# pyright: reportPrivateUsage=false

__all__ = [
    "CHZ_ERRORS",
    "MISSING",
    "CastError",
    "Field",
    "Reference",
    "is_subtype",
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


def doc_of(config_class: type, name: str) -> str:
    """What a field's class says about it; where a subclass has only another default, its base."""
    fields = (vars(each).get("__chz_fields__", {}).get(name) for each in config_class.__mro__)
    return next((field._doc for field in fields if field and field._doc), "")


def default_of(field: Field) -> object:
    """The field's default, made anew by a factory; `MISSING` where it has none."""
    if callable(factory := field._default_factory):
        return factory()
    return cast(object, field._default)


def cast_text(field: Field, text: str) -> object:
    """A field's value from what a user typed.

    Raises:
        CastError: The text is no such value.
    """
    cast_own = field._blueprint_cast or (field.meta_factory and field.meta_factory.perform_cast)
    return cast_own(text) if cast_own else text
