import dataclasses
import math

import pytest

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError


@dataclasses.dataclass
class Settings:
    rate: float | None = None
    size: int | None = None


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "accepted"),
    [
        ({"at_least": 0}, [0, 2.5], [-1], "0 or more"),
        ({"at_least": 2}, [2, 1e30], [1.9], "at least 2"),
        ({"above": 0}, [1e-30, 10**30], [0, -1], "above 0"),
        ({"at_least": 0, "at_most": 1}, [0, 1], [-0.1, 1.1], "in [0, 1]"),
        ({"at_least": 0, "below": 1}, [0, 0.99], [-0.1, 1], "in [0, 1)"),
        ({"above": 0, "at_most": 1}, [0.01, 1], [0, 1.1], "in (0, 1]"),
        ({"above": 0, "below": 1}, [0.5], [0, 1], "in (0, 1)"),
        ({}, [-1.0, 0], [], "finite"),
    ],
)
def test_range_is_checked_and_named(
    limits: dict[str, float], inside: list[float], outside: list[float], accepted: str
) -> None:
    for value in [None, "auto", "exact", *inside]:
        check_range(Settings(rate=value), "rate", **limits)
    for value in [*outside, math.nan, math.inf, -math.inf]:
        with pytest.raises(ConfigError) as raised:
            check_range(Settings(rate=value), "rate", **limits)
        assert str(raised.value) == f"rate must be {accepted}, found {value}"


@pytest.mark.parametrize(
    ("value", "found"),
    [(1e-31, "1e-31"), (5e-324, "5e-324"), (1e300, "1e+300"), (10**400, f"1{'0' * 39}")],
)
def test_what_float32_cannot_multiply_or_divide_by_is_refused(value: float, found: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_range(Settings(rate=value), "rate", above=0)
    accepted = "rate must be above 0 and its size from 1e-30 to 1e+30"
    assert str(raised.value) == f"{accepted}, found {found}"
    check_range(Settings(rate=0.0), "rate", at_least=0)
