"""A type allows its values, and classes and functions only where it asks for them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import chz
import pytest

from es_cookbook.common.fields.declared_types import arms, fits, may_be_called


@chz.chz
class Part:
    size: int = 1


@chz.chz
class Small(Part):
    pass


def either(size: int) -> float | None:
    return size or None


@pytest.mark.parametrize(
    ("value", "declared", "whether"),
    [
        (1, float, True),
        (1.0, int, False),
        (True, int, False),
        (True, float | None, False),
        (True, bool | None, True),
        (True, Literal[1], False),
        (True, object, True),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        ((1, 2.0), tuple[float, ...], True),
        ([1], tuple[int, ...], False),
        (None, int | None, True),
        (None, None, True),
        (None, int, False),
        ({"a": 1}, Mapping[str, Any], True),
        ({1: 1}, Mapping[str, Any], False),
        (Small(), Part, True),
        (Part(), Small, False),
        (Small, Part, False),
        (Small, type[Part], True),
        (Part, type[Small], False),
        (either, Callable[..., float | None], True),
        (either, Part | Callable[..., object], True),
        (either, Part | None, False),
    ],
)
def test_values_fit_types(value: object, declared: object, whether: bool) -> None:
    assert fits(value, declared) is whether


def test_classes_stand_where_the_type_or_its_items_ask_for_them() -> None:
    assert may_be_called(Callable[..., Part] | None) and may_be_called(type[Part])
    assert may_be_called(tuple[Callable[..., int], ...])
    assert not any(map(may_be_called, (object, Any, Part, int, Literal[1])))
    assert set(arms(tuple[Part, ...] | dict[str, int] | None)) >= {Part, str, int, type(None)}
