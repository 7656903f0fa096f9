"""A type allows its values, and classes and functions only where it asks for them."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import chz
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.declared_types import (
    argument_types,
    entry_types,
    fits,
    holds_class,
    item_type,
    may_be_called,
    may_hold_object,
    takes,
)


@chz.chz
class Part:
    size: int = 1


@chz.chz
class Small(Part):
    pass


def made(size: int) -> Small:
    return Small(size=size)


async def waited(size: int) -> Small:
    return Small(size=size)


def either(size: int) -> float | None:
    return size or None


def untyped(size):  # noqa: ANN001, ANN201 # pyright: ignore
    return size


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
    ],
)
def test_values_fit_types(value: object, declared: object, whether: bool) -> None:
    assert fits(value, declared) is whether


def test_items_and_entries_are_what_the_brackets_say() -> None:
    assert item_type(tuple[int, str], tuple, 1) is str
    assert item_type(tuple[int, str], tuple, 2) is None
    assert item_type(tuple[int, ...] | Sequence[str], tuple, 9) == int | str
    assert item_type(list[int] | None, list, 0) is int
    assert item_type(tuple, tuple, 0) is object and item_type(object, list, 0) is object
    assert item_type(str, list, 0) is None and item_type(tuple[int, ...], list, 0) is None
    assert entry_types(Mapping[str, int] | None) == (str, int)
    assert entry_types(dict) == (object, object) and entry_types(list[int]) is None


def test_objects_and_what_is_called_stand_where_the_type_asks_for_them() -> None:
    assert may_hold_object(Part | None) and may_hold_object(object)
    assert not any(map(may_hold_object, (int | None, str, tuple[Part, ...], Literal[1])))
    assert holds_class(Small, Part | None) and not holds_class(Part, Small)
    assert may_be_called(Callable[..., Part] | None) and may_be_called(type[Part])
    assert not any(map(may_be_called, (object, Any, Part, int, tuple[Callable[..., int], ...])))


def test_a_function_returns_what_the_type_asks_for() -> None:
    assert takes(made, Callable[..., Part]) and takes(Small, Callable[..., Part])
    assert takes(waited, Callable[[int], Awaitable[Part]])
    assert not takes(waited, Callable[[int], Part])
    assert not takes(made, Callable[..., str]) and not takes(Small, Callable[..., str])
    assert takes(untyped, Callable[..., str]) and takes(made, Callable[..., object])
    assert takes(Small, type[Part]) and not takes(Part, type[Small])
    assert takes(either, Callable[..., float | None]) and not takes(either, Callable[..., float])
    assert fits(either, Part | Callable[..., object]) and not fits(either, Part | None)
    assert not takes(made, type[Part]) and not takes(Small, type[Part], partial=True)


def test_arguments_of_a_partial_are_those_of_its_function() -> None:
    def graded(a: int, *rest: str, b: float = 0.0, **others: bool) -> None: ...

    positional, named = argument_types(graded, [1, "x", "y"], {"b": 1, "c": 2})
    assert positional == [int, str, str] and named == {"b": float, "c": bool}
    assert argument_types(Small, [], {"size": 3}) == ([], {"size": int})
    for function, arguments in ((Small, {"seize": 3}), (made, {"size": 1, "x": 2})):
        with pytest.raises(ConfigError, match="got an unexpected keyword argument"):
            argument_types(function, [], arguments)
    with pytest.raises(ConfigError, match="made: too many positional arguments"):
        argument_types(made, [1, 2], {})
    assert argument_types(functools.partial(made, 1), [], {}) == ([], {})
