"""Checks of the fields of a config: their types and ranges."""

import collections.abc
import math
import re
from collections.abc import Collection, Iterator
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

import chz
from chz.tiepin import is_subtype_instance, type_repr

from es_cookbook.common.errors import ConfigError

LEAST, MOST = 1e-30, 1e30
"""Limits for magnitudes that are multiplied and divided in float32 (1e-38 to 3e38)."""
_UNIONS = (Union, UnionType)
_CONTAINERS = (*_UNIONS, tuple, list, dict, collections.abc.Mapping)


def check_range(
    config: object,
    *names: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    prefix: str = "",
) -> None:
    """Check that fields of a config are in a range; `prefix` is put before their names.

    Values that are not numbers, such as None and "auto", are accepted where a field's type has
    them; NaN, infinity and magnitudes outside `LEAST` to `MOST` are not. `above` and `below` are
    exclusive; an upper limit needs a lower one.

    Raises:
        ConfigError: Names the field, the range or type, and the value.
    """
    lower = at_least if above is None else above
    upper = at_most if below is None else below
    if upper is not None:
        left, right = "[" if above is None else "(", "]" if below is None else ")"
        accepted = f"in {left}{lower}, {upper}{right}"
    elif above is not None:
        accepted = f"above {above}"
    elif at_least is not None:
        accepted = f"at least {at_least}" if at_least else "0 or more"
    else:
        accepted = "finite"
    check_types(config, *names, prefix=prefix)
    for name in names:
        value = getattr(config, name)
        if value is None or isinstance(value, str):
            continue
        is_inside = (
            (lower is None or value > lower or value == at_least)
            and (upper is None or value < upper or value == at_most)
            and abs(value) < math.inf
        )
        if not is_inside or (value and not LEAST <= abs(value) <= MOST):
            sizes = f" and its size from {LEAST:g} to {MOST:g}" * is_inside
            raise ConfigError(f"{prefix}{name} must be {accepted}{sizes}, found {value!s:.40}")


def in_range(*names: str, prefix: str = "", **limits: float) -> chz.validate:
    """Return the validator of a config that is `check_range` of these fields.

    It is an attribute of the class under any name: `_counts = in_range("epochs", at_least=1)`.
    """
    return chz.validate(lambda config: check_range(config, *names, prefix=prefix, **limits))


def check_types(config: object, *names: str, prefix: str = "") -> None:
    """Check that fields of a config, all if none is named, have values of their types.

    A command line and a file give no others; a script may, and would be refused only when its run
    is read again.

    Raises:
        ConfigError: Names the field, what is accepted, and the value.
    """
    fields = chz.chz_fields(config) if chz.is_chz(config) else {}
    for name in (name for name in names or fields if name in fields):
        kind, value = fields[name].x_type, getattr(config, fields[name].x_name)
        if not fits(value, kind):
            is_literal = get_origin(kind) is Literal
            accepted = " or ".join(map(str, get_args(kind))) if is_literal else type_name(kind)
            raise ConfigError(f"{prefix}{name} must be {accepted}, found {value!r:.60}")


def type_name(of_type: object) -> str:
    """Return a type as its author wrote it, without the modules of its classes.

    >>> type_name(tuple[re.Pattern, ...] | None)
    'tuple[Pattern, ...] | None'
    >>> type_name(int | Literal["exact"] | None)
    "int | 'exact' | None"
    """
    if get_origin(of_type) is Union:  # A Literal is among them.
        return " | ".join(map(type_name, get_args(of_type)))
    if get_origin(of_type) is Literal:
        return " | ".join(map(repr, get_args(of_type)))
    return re.sub(r"[\w.]+[.:](?=\w)|(?<=None)Type", "", type_repr(of_type))


def fits(value: object, declared: object) -> bool:
    """Return whether a value is of a type, as chz checks it; True is not a number.

    >>> fits((1, 2), tuple[int, ...]), fits(1, float | None)
    (True, True)
    >>> fits(True, int), fits(True, dict[str, object])
    (False, False)
    """
    if isinstance(declared, type) and type(value) is declared:
        return True  # Most values; a turn of a rollout may have parameters of its own.
    if isinstance(value, bool):
        arms = list(_arms(declared, _UNIONS))
        literals = [each for arm in arms if _origin(arm) is Literal for each in get_args(arm)]
        return any(each in (bool, object, Any) or each is value for each in (*arms, *literals))
    if callable(value) and any(_origin(arm) is collections.abc.Callable for arm in _arms(declared)):
        return True  # chz takes no function that returns a union.
    return is_subtype_instance(value, cast(Any, declared))


def may_be_called(declared: object) -> bool:
    """Return whether a type accepts a class or a function itself as a value; `Any` does not."""
    return any(_origin(arm) in (collections.abc.Callable, type) for arm in _arms(declared))


def _arms(declared: object, of: Collection[object] = _CONTAINERS) -> Iterator[object]:
    """Yield the types of accepted values: members of unions, and items of containers."""
    if _origin(declared) in of:
        for inner in get_args(declared) or (object,):
            yield from _arms(inner, of)
    else:
        yield declared


def _origin(declared: object) -> Any:  # noqa: ANN401
    return get_origin(declared) or declared
