"""Rewards are added by weight, reported by name, and named by rows."""

import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.plugins.objectives.length import Length
from es_cookbook.plugins.objectives.weighted_sum import WeightedSum
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.base import Reward, graded
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.types import ANSWER

TEXT = "<think>2+2</think><answer>4.0</answer>"


async def test_the_sum_and_each_reward_by_its_name() -> None:
    reward = WeightedSum(rewards=("number", "exact", "format"), weights=(2.0, 1.0, 0.5))
    metrics = {"number": 1.0, "exact": 0.0, "format": 1.0}
    expected = Grade(2.5, metrics, {ANSWER: "4"})  # as the number is read
    assert await graded(reward, TEXT, {"answer": "4"}, "row 1") == expected
    assert reward(TEXT, {"answer": "4"}) == (2.5, expected.metrics)


async def test_rewards_that_run_elsewhere_are_added_too() -> None:
    reward = WeightedSum(rewards=("regex", "length"), length=Length(of=Number(), limit=4))
    grade = await graded(reward, "so 4", {"answer": 4, "pattern": "o"}, "row 1")
    assert grade == Grade(1.85, {"number": 1.0, "regex": 1.0, "length": 0.85}, {ANSWER: "4"})


@pytest.mark.parametrize(
    ("named", "score"),
    [
        ("number", (2.0, {"number": 1.0})),
        (["format", "exact"], (1.0, {"format": 1.0, "exact": 0.0})),
        (None, (2.0, {"number": 1.0})),
    ],
)
def test_a_row_names_its_own_rewards(named: object, score: object) -> None:
    reward = WeightedSum(rewards=("number",), weights=(2.0,))
    assert reward(TEXT, {"answer": "4", "reward": named}) == score


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"reward": "exakt"}, r"field 'reward': unknown 'exakt': did you mean 'exact'\? Accepted:"),
        (
            {"reward": "os:system"},
            "field 'reward': unknown 'os:system': accepted: choice, conciseness",
        ),
        ({"reward": ["exact", 3]}, r"a reward's name, or a list of names, found \['exact', 3\]"),
    ],
)
async def test_a_row_names_shared_rewards_only(row: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        WeightedSum().check_row(row)
    with pytest.raises(EnvError, match=f"row 1: reward 'sum': .*{sentence}"):
        await graded(WeightedSum(), TEXT, row, "row 1")


async def test_a_row_that_lacks_something_is_told_with_the_reward_that_needs_it() -> None:
    reward = WeightedSum(rewards=("format", "number"))
    sentence = "field 'answer' is missing; the row has: nothing"
    with pytest.raises(DataError, match=f"^reward 'number': {sentence}"):
        reward.check_row({})
    with pytest.raises(EnvError, match=f"^row 1: reward 'sum': number: {sentence}"):
        await graded(reward, TEXT, {}, "row 1")
    with pytest.raises(ConfigError, match=r"the judge at .* needs model="):
        reward.check_row({"reward": "judge", "question": "?"})


@pytest.mark.parametrize("kind", [Length, WeightedSum])
def test_a_reward_made_of_others_passes_on_all_that_they_do(kind: type[Reward]) -> None:
    assert {name for name in vars(Reward) if not name.startswith("_")} <= {*vars(kind)}


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        (("exact", "formt"), "rewards: unknown 'formt': did you mean 'format'"),
        ((), "rewards must be at least one of choice, conciseness"),
        (("exact", "exact"), "rewards must differ, found exact,exact"),
    ],
)
def test_what_cannot_be_added_is_refused(rewards: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WeightedSum(rewards=rewards)
