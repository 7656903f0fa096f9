"""Checks of the fields of a config."""

import math
from typing import Literal, get_args, get_origin

import chz

from es_cookbook.common.errors import ConfigError

LEAST, MOST = 1e-30, 1e30
"""Limits for magnitudes that are multiplied and divided in float32 (1e-38 to 3e38)."""


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

    None, "auto" and "exact", numbers that a run finds, are accepted; NaN, infinity and magnitudes
    outside `LEAST` to `MOST` are not. `above` and `below` are exclusive; an upper limit needs a
    lower one.

    Raises:
        ConfigError: Names the field, the range and the value.
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
    for name in names:
        value = getattr(config, name)
        if value in (None, "auto", "exact"):
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


def check_literals(config: object) -> None:
    """Check that fields of a config with a `Literal` type have one of its values.

    Raises:
        ConfigError: Names the field, the values and the one found.
    """
    for name, field in chz.chz_fields(config).items():
        kind: object = field.final_type
        if get_origin(kind) is Literal and (value := getattr(config, name)) not in get_args(kind):
            raise ConfigError(f"{name} must be {' or '.join(get_args(kind))}, found {value!r:.60}")
