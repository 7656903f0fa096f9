"""What the declared type of a field allows, asked of values that come from a file.

chz's own check of types is the base of it. It is stricter in two points: true and false are not
numbers, and a class or a function needs a type that asks for one: `object` and `Any` do not.
"""

import collections.abc
import typing
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, cast

from es_cookbook.common.fields.chz_fields import is_subtype_instance

ANYTHING: tuple[object, ...] = (object, Any)
_CONTAINERS = (typing.Union, UnionType, tuple, list, dict, collections.abc.Mapping)


def fits(value: object, declared: object) -> bool:
    """Whether a value is of a type.

    >>> fits((1, 2), tuple[int, ...]), fits(1, float | None), fits(True, int)
    (True, True, False)
    """
    if isinstance(value, bool):
        return any(
            arm in (bool, *ANYTHING) or any(value is literal for literal in typing.get_args(arm))
            for arm in arms(declared)
        )
    if callable(value) and may_be_called(declared):  # chz takes no function that returns a union.
        return any(_is_called(arm) or _is(value, arm) for arm in arms(declared))
    return _is(value, declared)


def may_be_called(declared: object) -> bool:
    """Whether a class or a function itself may stand there, and not only an object."""
    return any(_is_called(arm) or (typing.get_origin(arm) or arm) is type for arm in arms(declared))


def _is_called(arm: object) -> bool:
    return (typing.get_origin(arm) or arm) is collections.abc.Callable


def _is(value: object, declared: object) -> bool:
    return is_subtype_instance(value, cast(Any, declared))


def arms(declared: object) -> Iterator[object]:
    """The types of which values may stand there: members of unions, and items of containers."""
    if (typing.get_origin(declared) or declared) in _CONTAINERS:
        for inner in typing.get_args(declared) or (object,):
            yield from arms(inner)
    else:
        yield NoneType if declared is None else declared
