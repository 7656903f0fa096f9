"""Numbers of an objective follow what was solved lately."""

import math
from typing import Any

import numpy as np
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.objectives.by_performance import ByPerformance
from es_cookbook.plugins.objectives.length import LengthPenalty
from es_cookbook.plugins.objectives.weighted import Gdpo
from es_cookbook.rl.objectives import MaxOfK, Mean, Objective, Outcomes, PassAtK

NAN = math.nan


def between(first: Objective, last: Objective, **how: Any) -> ByPerformance:
    return ByPerformance(first=first, last=last, low=0.2, high=0.7, **how)


def test_numbers_move_with_what_was_solved_lately() -> None:
    budget = between(LengthPenalty(limit=400), LengthPenalty(limit=100, strength=0.5), window=2)
    shares = [(), (0.1,), (0.2, 0.7), (0.9, 0.2, 0.3), (0.7,), (0.0, 1.0, 1.0)]
    done = [budget.done(each) for each in shares]
    assert done == pytest.approx([0, 0, 0.5, 0.1, 1, 1])
    half = LengthPenalty(limit=250, strength=0.4)
    assert [budget.at(each) for each in (0, 0.5, 1)] == [budget.first, half, budget.last]
    threshold = between(PassAtK(k=1, threshold=0), PassAtK(k=1, threshold=1))
    assert threshold.at(0.25) == PassAtK(k=1, threshold=0.25), "no whole number"
    weights = between(Gdpo(weights=(1.0, 0.0)), Gdpo(weights=(0.2, 0.8)))
    assert weights.at(0.5) == Gdpo(weights=(0.6, 0.4))


def test_scores_are_those_of_the_objective_in_between() -> None:
    moving = between(PassAtK(k=1, threshold=0), PassAtK(k=1, threshold=1))
    rewards_P_G_K = np.array([[[0.2, 0.6], [1.0, NAN]]])
    for shares, expected in (((), [1.0, 1.0]), ((0.45,), [0.5, 1.0]), ((0.8,), [0.0, 1.0])):
        found = Outcomes(rewards_P_G_K, rewards_P_G_K, {"correct": rewards_P_G_K}, 3, shares)
        assert moving(found).tolist() == [expected]
        assert moving.metrics(found) == {"objective/done": pytest.approx(moving.done(shares))}


def test_what_is_inside_of_another_objective_follows_results_too() -> None:
    moving = between(MaxOfK(k=1), MaxOfK(k=3))
    assert LengthPenalty(inner=moving).follows_results
    assert not LengthPenalty(inner=MaxOfK(k=1)).follows_results


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: between(Mean(), MaxOfK()), "first and last must be the same objective with diff"),
        (lambda: between(MaxOfK(), MaxOfK()), "must be the same objective with different numbers"),
        (
            lambda: between(LengthPenalty(), LengthPenalty(limit=9)),
            "first.limit and last.limit must be equal, or numbers, .* found None and 9",
        ),
        (
            lambda: between(Gdpo(rewards=("a", "b")), Gdpo(rewards=("a", "c"))),
            "first.rewards and last.rewards must be equal, or numbers",
        ),
        (
            lambda: ByPerformance(first=MaxOfK(k=1), last=MaxOfK(k=2), low=0.5, high=0.5),
            "high must be above 0.5, found 0.5",
        ),
        (lambda: between(MaxOfK(k=1), MaxOfK(k=2), window=0), "window must be at least 1, found 0"),
        (
            lambda: between(MaxOfK(k=1), MaxOfK(k=3)).check(2, 1.0),
            "objective.last.k=3 needs attempts=3 or more at each problem, found attempts=2",
        ),
    ],
)
def test_numbers_that_cannot_follow_results_are_refused(made: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        made()
