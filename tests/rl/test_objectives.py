"""Scores of several attempts are what the estimators say, and refuse what they cannot estimate."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.objectives.length import LengthPenalty
from es_cookbook.rl.objectives import MaxOfK, Objective, Outcomes, PassAtK, max_of_k, pass_at_k

NAN = math.nan


def of(rewards_P_G_K: Any, tokens_P_G_K: Any = None, **metrics: Any) -> Outcomes:
    rewards = np.array(rewards_P_G_K, dtype=np.float64)
    tokens = np.ones(rewards.shape) if tokens_P_G_K is None else np.array(tokens_P_G_K, float)
    return Outcomes(rewards, tokens, {name: np.array(m, float) for name, m in metrics.items()})


def scores(objective: Objective, *args: Any, **metrics: Any) -> list[list[float]]:
    return objective(of(*args, **metrics)).tolist()


def counts(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_and_max_of_k_are_means_over_all_choices_of_k_attempts(
    n: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    numbers = st.lists(st.floats(-5, 5, width=32), min_size=n, max_size=n)
    rewards_K = data.draw(numbers)
    best = [max(chosen) for chosen in itertools.combinations(rewards_K, k)]
    assert max_of_k(np.array([[rewards_K]]), k).item() == pytest.approx(np.mean(best), abs=1e-9)
    solved_K = [reward > 0 for reward in rewards_K]
    any_solved = [any(chosen) for chosen in itertools.combinations(solved_K, k)]
    found = pass_at_k(counts(n), counts(sum(solved_K)), k).item()
    assert found == pytest.approx(np.mean(any_solved), abs=1e-12)
    assert pass_at_k(counts(2000), counts(1), 1000).tolist() == pytest.approx([0.5])


def test_attempts_are_solved_by_their_metric_whatever_their_reward() -> None:
    rewards = [[[1.0, 0.1], [0.9, 0.2]], [[0.0, 0.0], [0.0, NAN]]]
    correct = [[[0.0, 0.0], [1.0, NAN]], [[1.0, 1.0], [1.0, NAN]]]
    assert scores(PassAtK(k=2), rewards, correct=correct) == [
        [0, 1],
        [1, pytest.approx(NAN, nan_ok=True)],
    ]
    by_reward = PassAtK(k=1, metric="reward", threshold=0.9)
    assert scores(by_reward, rewards) == [[0.5, 0.5], [0.0, 0.0]]


def test_a_metric_that_nobody_reports_is_refused_with_the_nearest() -> None:
    sentence = r"found 'corect': did you mean 'correct'\? Accepted: correct, reward$"
    with pytest.raises(ConfigError, match=sentence):
        PassAtK(k=1, metric="corect")(of([[[1.0]]], correct=[[[1.0]]]))
    assert np.isnan(PassAtK(k=1)(of([[[NAN]]]))).all(), "everything lost is not the metric's fault"


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: LengthPenalty(inner=PassAtK()), "use inner=max_of_k, or inner.metric=reward"),
        (
            lambda: PassAtK(k=4).check(3, 1.0),
            r"^objective\.k=4 needs attempts=4 .*found attempts=3",
        ),
        (
            lambda: LengthPenalty(inner=MaxOfK(k=5)).check(4, 1.0),
            r"^objective\.inner\.k=5 needs attempts=5",
        ),
        (lambda: MaxOfK(k=2).check(2, 0.0), "greedy ones do not: set sampling.temperature above 0"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(made: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        made()
