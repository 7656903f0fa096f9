"""What the command line needs of chz 0.4 that chz does not publish; pyproject bounds chz for it."""

from typing import cast

from chz.blueprint import (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
    Reference,
)
from chz.field import Field
from chz.tiepin import CastError, type_repr
from chz.util import MISSING

# pyright: reportPrivateUsage=false

__all__ = ["CHZ_ERRORS", "MISSING", "CastError", "Field", "Reference", "type_repr"]

CHZ_ERRORS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
"""What chz raises about options."""


def doc_of(field: Field) -> str:
    """The field's documentation."""
    return field._doc


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
