"""What is shown of an evaluation has its value, its interval, and the right problems."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from es_cookbook import PopulationSampler, SamplingParams
from es_cookbook.common.errors import ConfigError
from es_cookbook.population.evaluate import attempt, summary
from es_cookbook.population.results import (
    VOTE,
    Results,
    compare,
    majorities,
    results_of,
    wilson_interval,
)
from es_cookbook.rl.objectives import Outcomes
from tests.fakes import FakeEngine, problem

NAN = math.nan


def results(
    correct_P_K: Sequence[Sequence[float]],
    rewards_P_K: Sequence[Sequence[float]] | None = None,
    tags_P: Sequence[tuple[str, ...]] | None = None,
) -> Results:
    """Of problems called 0, 1, ..."""
    correct = np.array(correct_P_K, dtype=np.float64)[:, None, :]
    rewards = correct if rewards_P_K is None else np.array(rewards_P_K)[:, None, :]
    return Results(
        [str(p) for p in range(len(correct))],
        tags_P or [()] * len(correct),
        Outcomes(rewards, rewards, {"correct": correct}),
        [[]] * len(correct),
    )


def test_several_attempts_are_over_problems_and_other_numbers_have_a_bootstrap() -> None:
    several = results([[1, 0]] * 10 + [[1, 1]] * 10).estimate("correct")
    assert (several.value, several.method, several.problems) == (0.75, "Wilson", 20)
    # Half of the problems have 0.5 and half 1, which is less spread than that of 40 attempts.
    more = 20 * 10 / (10 + 4)
    expected = wilson_interval(0.75 * (20 + more), 20 + more)
    assert (several.low, several.high) == pytest.approx(expected)
    other = results([[1]] * 4, [[0.5], [2.0], [1.0], [0.5]]).estimate("reward")
    assert (other.value, other.method, other.is_share) == (1.0, "bootstrap", False)


def test_lost_attempts_are_left_out() -> None:
    found = results([[1, NAN], [0, 0], [NAN, NAN]])
    assert found.estimate("correct").value == pytest.approx(1 / 3), "over three attempts"
    assert found.estimate("reward").value == 0.5, "over two problems"
    assert found.estimate("reward").problems == 2
    assert found.pass_at(2).value == 0.0 and found.pass_at(2).problems == 1
    nothing = results([[NAN]])
    assert math.isnan(nothing.estimate("reward").value) and nothing.estimate("reward").problems == 0
    assert math.isnan(nothing.estimate("reward").low) and not nothing.estimate("reward").is_share
    assert results([[1.0]]).estimate("reward").is_share


def test_of_other_metrics_than_the_reward_a_problem_counts_by_its_attempts() -> None:
    """Where not all have as many; by hand, weights 2/3 and 1/3 of means 1 and 0."""
    found = results([[1, 1], [0, NAN]])
    correct, reward = found.estimate("correct"), found.estimate("reward")
    # 1 / (4/9 + 1/9) = 1.8 problems; a variance of 16/81 is worth 1.125, which is less.
    assert (correct.low, correct.high) == pytest.approx(wilson_interval(1.2, 1.8))
    assert (correct.value, reward.value) == (pytest.approx(2 / 3), 0.5)
    assert (reward.low, reward.high) == pytest.approx(wilson_interval(1, 2))
    even = results([[1, 1], [0, 0]]).estimate("correct")
    assert (even.low, even.high) == pytest.approx(wilson_interval(1, 2))


def test_pass_at_k_is_unbiased_and_its_interval_is_over_problems() -> None:
    found = results([[1, 0, 0, 0]] * 20 + [[0, 0, 0, 0]] * 20)
    assert [found.pass_at(k).value for k in (1, 2, 4)] == [0.125, 0.25, 0.5]
    assert found.pass_at(4).low == pytest.approx(0.5 - 1.96 * 0.5 / math.sqrt(40), abs=0.03)


def test_two_evaluations_are_compared_problem_by_problem() -> None:
    first = results([[1], [1], [1], [0], [0], [1]])
    second = results([[0], [0], [0], [0], [1], [NAN]])
    found = compare(first, second, "correct")
    assert (found.problems, found.better, found.worse) == (5, 3, 1)
    assert (found.first, found.second) == (0.6, 0.2)
    assert found.difference == pytest.approx(0.4)
    assert found.p == 0.625, "2 (C(4, 0) + C(4, 1)) / 2⁴"
    # By hand (Agresti and Min): 3 fixed, 1 broken, of 5 + 2: 2/7 ± 1.96 √((5/7 - 4/49) / 7).
    half = 1.96 * math.sqrt((5 / 7 - 4 / 49) / 7)
    assert (found.low, found.high) == pytest.approx((2 / 7 - half, 2 / 7 + half), abs=1e-4)
    other_way = compare(second, first, "correct")
    assert (other_way.better, other_way.worse, other_way.p) == (1, 3, 0.625)
    assert other_way.difference == -found.difference
    spread = [[[10.0 * p + more] for p in range(20)] for more in (1, 0)]
    wide = compare(*(results([[1]] * 20, rewards) for rewards in spread), "reward")
    assert (wide.low, wide.high) == (1.0, 1.0), "the problems' own spread cancels"
    assert found.is_share and not wide.is_share
    half = results([[1], [1]], [[0.5], [1.0]])
    assert not compare(half, half, "reward").is_share
    assert compare(half, half, "correct").is_share


def test_what_is_of_other_problems_is_not_compared() -> None:
    one = results([[1], [0]])
    with pytest.raises(ConfigError, match="one has 2 and the other 3"):
        compare(one, results([[1], [0], [1]]), "correct")
    other = Results(["0", "elsewhere"], one.tags_P, one.outcomes, one.lost_P)
    with pytest.raises(ConfigError, match="problem 1 is '1' of one and 'elsewhere' of the other"):
        compare(one, other, "correct")
    with pytest.raises(ConfigError, match=r"metric must be .* did you mean 'correct'"):
        compare(one, one, "corect")


@pytest.mark.parametrize("attempts", [1, 3])
async def test_values_are_those_that_an_evaluation_of_a_run_reports(attempts: int) -> None:
    sampler = PopulationSampler(FakeEngine(), sampling=SamplingParams(max_tokens=4))
    problems_P = [problem(number, "test") for number in range(60)]
    groups_P = await attempt(sampler, problems_P, attempts, temperature=1.0)
    found = results_of(problems_P, groups_P)
    reported = summary(groups_P, found.at_ks())
    assert found.names_P[3] == "test 3" and found.metrics == ["reward", "correct", "format"]
    expected = {
        "env/all/correct": found.estimate("correct"),
        "env/all/format": found.estimate("format"),
        "env/even/correct": found.estimate("correct", tag="even"),
        "env/even/format": found.estimate("format", tag="even"),
        "reward/mean": found.estimate("reward"),
    }
    expected |= {f"pass@{k}": found.pass_at(k) for k in (1, 2, 3) if attempts > 1}
    assert {key: estimate.value for key, estimate in expected.items()} == {
        key: value for key, value in reported.items() if not key.startswith("rollouts/")
    }, "bit for bit"
    assert all(e.low <= e.value <= e.high for e in expected.values())


def test_the_answer_of_most_counts_and_ties_count_alike() -> None:
    answers_P = [
        ["4", "7", "7", None],  # 7 wins
        ["4", "4", "7", "7"],  # a tie of a wrong and a right one
        [None, None, None, None],
        ["5", "6", "6", "8"],  # 6 is wrong
    ]
    values = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], float)
    assert majorities(answers_P, values, 4).tolist() == [1.0, 0.5, 0.0, 0.0]
    # Sets of two: 4 or 7, and then 7; 4 and then 7; none; 5 or 6, and then 6 or 8.
    assert majorities(answers_P, values, 2).tolist() == [0.75, 0.5, 0.0, 0.25]
    # A lost attempt has no answer and no value.
    lost = np.array([[NAN, 1, 0]])
    assert majorities([[None, "7", "4"]], lost, 3).tolist() == [0.5]


def test_votes_are_a_metric_that_can_be_compared() -> None:
    many = dataclasses.replace(
        results([[1, 1, 0], [0, 0, 1]]), answers_P=[list("774"), list("445")]
    )
    one = dataclasses.replace(results([[0], [1]]), answers_P=[["4"], ["5"]])
    assert many.can_vote and not results([[1]]).can_vote
    voted = many.voted("correct")
    assert voted.values(VOTE).tolist() == [[1, 1, 1], [0, 0, 0]]
    found = compare(voted, one.voted("correct"), VOTE)
    assert (found.first, found.second, found.better, found.worse) == (0.5, 0.5, 1, 1)
    assert many.majority_at(3).value == 0.5 and many.majority_at(3).is_share
    assert many.pass_at(3).is_share
