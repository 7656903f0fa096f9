"""Countdown: problems, the data set, what answers earn, and the bundled model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from es_cookbook.recipes.countdown.arithmetic import CountdownReward, evaluate
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder, CountdownEnv, solve
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Observation
from tests.recipe_problems import Builders, build
from tools.bundled.countdown import CHARACTERS
from tools.small_model import build_tokenizer


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


pytestmark = pytest.mark.anyio


async def _build(
    tokenizer: PreTrainedTokenizerBase | None = None, **fields: object
) -> tuple[Builders, Builders]:
    defaults: dict[str, object] = {"problems_per_generation": 1, "num_train": 50, "num_test": 20}
    builder = CountdownDatasetBuilder(**{**defaults, **fields})  # pyright: ignore
    train, test = await build(builder, tokenizer or build_tokenizer(CHARACTERS))
    return list(train.builders), test


def _env(builder: ProblemGroupBuilder) -> CountdownEnv:
    env = builder.make_env()
    assert isinstance(env, CountdownEnv)
    return env


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
    env = CountdownEnv(Observation((1,)), (2, 3, 4), 10, CountdownReward())
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    names = ("correct", "format", "well_formed", "correct_well_formed")
    assert result.metrics == dict(zip(names, metrics, strict=True))
