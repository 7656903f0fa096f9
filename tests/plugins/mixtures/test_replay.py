"""The replay buffer: running statistics, upper confidence bounds, and what is forgotten."""

import math
from typing import Any

import pytest

from es_cookbook.plugins.mixtures.selection import Replay, ReplayBuffer
from es_cookbook.rl.types import ProblemResult


def buffer(**fields: Any) -> ReplayBuffer:
    """One whose values are the rewards."""
    return ReplayBuffer(Replay(**{"value": "reward", "exploration": 0.0, **fields}))


def tell(into: ReplayBuffer, **rewards: float) -> None:
    into.tell([ProblemResult(name, reward, 0.0) for name, reward in rewards.items()])


def test_bounds_are_those_of_the_formula_and_the_largest_come_first() -> None:
    one = buffer(exploration=0.3)
    for _ in range(9):
        tell(one, known=0.6)
    tell(one, new=0.4)
    bounds = one.bounds()
    assert math.isclose(bounds["known"], 0.6 + 0.3 * math.sqrt(math.log(11) / 9))
    assert math.isclose(bounds["new"], 0.4 + 0.3 * math.sqrt(math.log(11)))
    assert one.sample(2) == ["new", "known"]
    assert one.sample(2, without=["new"]) == ["known"]
    greedy = buffer()
    tell(greedy, low=0.1, high=0.9, middle=0.5)
    assert greedy.sample(2) == ["high", "middle"]


def test_a_full_buffer_keeps_the_better_and_takes_back_what_it_forgot() -> None:
    one = buffer(capacity=2)
    assert one.sample(1) == []
    tell(one, a=0.5, b=0.2, c=0.1)
    assert list(one.known) == ["a", "b"]
    tell(one, d=0.3)
    assert list(one.known) == ["a", "d"]
    tell(one, b=0.9)
    assert one.known == {"a": (1, 0.5), "b": (1, 0.9)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("learnable", {"a": 0.75, "b": 0.0}),
        ("reward", {"a": 0.4, "b": 0.9}),
        ("solved", {"a": 0.5, "b": 1.0}),
    ],
)
def test_what_a_problem_is_worth(value: str, expected: dict[str, float]) -> None:
    lost = ProblemResult("lost", math.nan, math.nan)
    twice = [ProblemResult("a", 0.4, 0.25), ProblemResult("a", 0.4, 0.75)]
    found = Replay(value=value).values([*twice, ProblemResult("b", 0.9, 1.0), lost])  # pyright: ignore
    assert found == expected
