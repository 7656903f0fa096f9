"""The replay buffer: running statistics, upper confidence bounds, and what is forgotten."""

import math
import statistics

import pytest

from es_cookbook.rl.data.choosing import Replay, ReplayBuffer
from es_cookbook.rl.types import ProblemResult


def test_statistics_are_those_of_all_values() -> None:
    values = [0.25, 0.5, 0.0, 1.0, 0.75]
    buffer = ReplayBuffer(capacity=10, exploration=1.0)
    for value in values:
        buffer.add("a", value)
    known = buffer.state()["a"]
    assert known.count == 5
    assert math.isclose(known.mean, statistics.mean(values))
    assert len(buffer) == 1


def test_bounds_are_those_of_the_formula_and_the_largest_come_first() -> None:
    buffer = ReplayBuffer(capacity=10, exploration=0.3)
    for _ in range(9):
        buffer.add("known", 0.6)
    buffer.add("new", 0.4)
    assert math.isclose(buffer.bound("known"), 0.6 + 0.3 * math.sqrt(math.log(11) / 9))
    assert math.isclose(buffer.bound("new"), 0.4 + 0.3 * math.sqrt(math.log(11)))
    assert buffer.sample(2) == ["new", "known"]
    assert buffer.sample(2, without=["new"]) == ["known"]
    greedy = ReplayBuffer(capacity=10, exploration=0.0)
    greedy.add_group({"low": 0.1, "high": 0.9, "middle": 0.5})
    assert greedy.sample(2) == ["high", "middle"]


def test_a_full_buffer_keeps_the_better_and_takes_back_what_it_forgot() -> None:
    buffer = ReplayBuffer(capacity=2, exploration=0.0)
    buffer.add_group({"a": 0.5, "b": 0.2})
    buffer.add("c", 0.1)
    assert list(buffer.state()) == ["a", "b"]
    buffer.add("d", 0.3)
    assert list(buffer.state()) == ["a", "d"]
    buffer.add("b", 0.9)
    assert list(buffer.state()) == ["a", "b"]
    assert buffer.state()["b"].count == 1
    assert math.isclose(ReplayBuffer(2, 0.0).sample(1) == [], True)
    with pytest.raises(KeyError):
        buffer.update("d", 1.0)


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


def test_only_solved_problems_may_be_taken_in_and_those_in_it_are_always_updated() -> None:
    replay = Replay(solved_only=True, value="reward")
    buffer = replay()
    results = [ProblemResult("a", 0.5, 0.25), ProblemResult("b", 0.4, 0.0)]
    buffer.add_group(replay.values(results), replay.admitted(results))
    assert list(buffer.state()) == ["a"]
    failed = [ProblemResult("a", 0.1, 0.0), ProblemResult("b", 0.6, 0.5)]
    buffer.add_group(replay.values(failed), replay.admitted(failed))
    assert {name: known.count for name, known in buffer.state().items()} == {"a": 2, "b": 1}
    assert math.isclose(buffer.state()["a"].mean, 0.3)
    assert Replay().admitted(results) is None
