"""Countdown: problems, the data set, what answers earn, and the bundled model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.recipes.countdown.arithmetic import CountdownReward, evaluate
from es_cookbook.recipes.countdown.dataset import CountdownEnv, Problem, solve
from es_cookbook.rl.types import Action, Observation


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(1, 99))
def test_solutions_use_each_number_once_and_hit_the_target(numbers: list[int], target: int) -> None:
    solution = solve(numbers, target)
    if solution is None:
        return
    evaluated = evaluate(solution.expression)
    assert evaluated is not None
    value, used = evaluated
    assert value == target and sorted(used) == sorted(numbers)
    step, _, result = solution.first_step.partition("=")
    first = evaluate(step)
    assert first is not None
    assert str(first[0]) == result


@pytest.mark.parametrize(
    ("numbers", "target", "solvable"),
    [([8, 8, 3, 3], 24, True), ([1, 1, 1, 1], 24, False), ([7], 7, True)],  # 8/(3-8/3)
)
def test_what_can_be_solved(numbers: list[int], target: int, solvable: bool) -> None:
    assert (solve(numbers, target) is not None) == solvable


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("<think>3*4=12</think><answer>3*4-2</answer>", 1.0, (1.0, 1.0, 1.0, 1.0)),
        ("<think>3*4=12</think><answer>3*4+2</answer>", 0.1, (0.0, 1.0, 1.0, 0.0)),
        ("<think>3*4=12</think><answer>3*4-2=10</answer>", 0.1, (0.0, 1.0, 0.0, 0.0)),
        ("<think>3*4=12<answer>3*4-2</answer>", 0.025, (0.0, 0.25, 0.0, 0.0)),
        ("", 0.0, (0.0, 0.0, 0.0, 0.0)),
    ],
)
async def test_metrics_keep_answer_and_form_apart(
    text: str, reward: float, metrics: tuple[float, ...]
) -> None:
    env = CountdownEnv(Observation((1,)), Problem((2, 3, 4), 10), CountdownReward())
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    names = ("correct", "format", "well_formed", "correct_well_formed")
    assert result.metrics == dict(zip(names, metrics, strict=True))
