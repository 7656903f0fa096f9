"""Scores of several attempts are what the estimators say, and refuse what they cannot estimate."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.objectives import (
    ByPerformance,
    Gdpo,
    LengthPenalty,
    MaxOfK,
    Mean,
    Objective,
    Outcomes,
    PassAtK,
    max_of_k,
    normalised,
    outcomes,
    pass_at_k,
    pass_at_k_advantages,
)
from es_cookbook.rl.rollouts import mean_rewards
from es_cookbook.rl.types import (
    GroupReward,
    LostRollout,
    TrajectoryGroup,
)
from tests.fakes import trajectory

NAN = math.nan
LOST = LostRollout("ValueError: no", "")


def of(rewards_P_G_K: Any, tokens_P_G_K: Any = None, **metrics: Any) -> Outcomes:
    rewards = np.array(rewards_P_G_K, dtype=np.float64)
    tokens = np.ones(rewards.shape) if tokens_P_G_K is None else np.array(tokens_P_G_K, float)
    return Outcomes(rewards, tokens, {name: np.array(m, float) for name, m in metrics.items()})


def scores(objective: Objective, *args: Any, **metrics: Any) -> list[list[float]]:
    return objective(of(*args, **metrics)).tolist()


def counts(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 0, 2, 0.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 1, 4, 1.0),
        (4, 2, 2, 5 / 6),
        (4, 3, 2, 1.0),
        (10, 3, 5, 1 - 21 / 252),
        (2000, 1, 1000, 0.5),
        (3, 3, 4, NAN),
    ],
)
def test_literal_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    found = pass_at_k(counts(n), counts(c), k).tolist()
    assert found == pytest.approx([expected], nan_ok=True)


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


@pytest.mark.parametrize(
    ("n", "c", "k", "of_solved", "of_failed"),
    [
        # ρ = 1 - C(3, 2)/C(4, 2) = s = 1/2; failed: 1/2 - C(2, 1)/C(3, 1) = -1/6.
        (4, 1, 2, 1.0, -1 / 3),
        # ρ = 1 - C(5, 4)/C(8, 4) = 13/14; failed: 1/14 - C(4, 3)/C(7, 3) = -3/70.
        (8, 3, 4, (1 / 14) / math.sqrt(13) * 14, -(3 / 70) / math.sqrt(13) * 14),
        (6, 2, 1, math.sqrt(2), -1 / math.sqrt(2)),  # the group's baseline
        (4, 3, 2, 0.0, 0.0),  # every group of two has a right one
        (4, 0, 2, 0.0, 0.0),
        (3, 1, 4, 0.0, 0.0),  # too few were left
    ],
)
def test_literal_advantages_of_pass_at_k(
    n: int, c: int, k: int, of_solved: float, of_failed: float
) -> None:
    found_K = pass_at_k_advantages([True] * c + [False] * (n - c), k)
    assert found_K == pytest.approx([of_solved] * c + [of_failed] * (n - c), abs=1e-12)


@given(st.integers(1, 8), st.data())
def test_advantages_of_pass_at_k_are_means_over_all_groups_of_k_answers(
    n: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    solved_K = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    groups = list(itertools.combinations(range(n), k))
    rewards = np.array([float(any(solved_K[i] for i in group)) for group in groups])
    above = rewards - rewards.mean()
    plain_K = [
        np.mean([a for a, group in zip(above, groups, strict=True) if i in group]) for i in range(n)
    ]
    assert pass_at_k_advantages(solved_K, k, normalise=False) == pytest.approx(plain_K, abs=1e-12)
    normalised_K = np.array(plain_K) / (rewards.std() or 1.0)
    assert pass_at_k_advantages(solved_K, k) == pytest.approx(normalised_K, abs=1e-9)


def test_max_of_all_is_the_maximum_and_of_one_the_mean() -> None:
    rewards_P_G_K = np.array([[[0.2, 0.9, 0.4], [0.1, NAN, 0.5]]])
    assert max_of_k(rewards_P_G_K, 3).tolist()[0][0] == pytest.approx(0.9)
    assert max_of_k(rewards_P_G_K, 2).tolist() == [[pytest.approx((0.9 + 0.9 + 0.4) / 3), 0.5]]
    assert max_of_k(rewards_P_G_K, 1)[0] == pytest.approx([0.5, 0.3])


def test_equal_rewards_are_exactly_equal_scores_however_many_attempts_are_left() -> None:
    rewards_P_G_K = np.array([[[0.3] * 7, [0.3] * 5 + [NAN] * 2, [0.3] * 3 + [NAN] * 4]])
    assert max_of_k(rewards_P_G_K, 3).tolist() == [[0.3] * 3]


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


def test_length_moves_rewards_before_the_inner_objective() -> None:
    rewards = [[[1.0, 1.0], [0.0, NAN]]]
    tokens = [[[10, 40], [20, NAN]]]
    penalty = LengthPenalty(limit=20)
    assert scores(penalty, rewards, tokens)[0] == pytest.approx([(0.85 + 0.7) / 2, 0.3])
    best = LengthPenalty(limit=20, inner=MaxOfK(k=2))
    assert scores(best, rewards, tokens)[0] == pytest.approx([0.85, NAN], nan_ok=True)
    solved_and_short = PassAtK(k=1, metric="reward", threshold=0.8)
    assert scores(LengthPenalty(limit=20, inner=solved_and_short), rewards, tokens) == [[0.5, 0.0]]


def test_without_a_limit_lengths_compare_within_their_problem() -> None:
    # The second problem needs ten times the length; its genomes score as the first's do.
    found = scores(LengthPenalty(), [[[1.0], [1.0]]] * 2, [[[10], [30]], [[100], [300]]])
    assert found[0] == pytest.approx([1 - 0.3 * 0.15865525, 1 - 0.3 * 0.84134475])
    assert found[1] == pytest.approx(found[0])


def groups() -> Sequence[TrajectoryGroup]:
    won = trajectory(0.5, {"correct": 1.0}, tokens=3)
    lost = trajectory(0.5, {}, {"correct": 0.0}, tokens=3)
    return [
        TrajectoryGroup([[won, LOST], [lost, won]]),
        TrajectoryGroup(
            [[LOST, LOST], [lost, lost]],
            [[GroupReward(0)] * 2, [GroupReward(rank, {"rank": rank}) for rank in (1, 2)]],
        ),
    ]


def test_groups_become_arrays_with_nan_where_there_is_nothing() -> None:
    found = outcomes(groups())
    np.testing.assert_array_equal(
        found.rewards_P_G_K, [[[0.5, NAN], [0.5, 0.5]], [[NAN, NAN], [1.5, 2.5]]]
    )
    np.testing.assert_array_equal(found.tokens_P_G_K, [[[3, NAN], [6, 3]], [[NAN, NAN], [6, 6]]])
    np.testing.assert_array_equal(
        found.metrics["correct"], [[[1, NAN], [0, 1]], [[NAN, NAN], [0, 0]]]
    )
    np.testing.assert_array_equal(found.metrics["rank"][1], [[NAN, NAN], [1, 2]])


def test_the_mean_is_the_mean_reward_bit_for_bit() -> None:
    np.testing.assert_array_equal(Mean()(outcomes(groups())), mean_rewards(groups()))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: PassAtK(k=0), "k must be at least 1, found 0"),
        (lambda: MaxOfK(k=-3), "k must be at least 1, found -3"),
        (lambda: PassAtK(threshold=NAN), "threshold must be finite, found nan"),
        (lambda: LengthPenalty(limit=0), "limit must be at least 1, found 0"),
        (lambda: LengthPenalty(strength=1.5), r"strength must be in \[0, 1\], found 1.5"),
        (lambda: LengthPenalty(right_above=NAN), "right_above must be finite, found nan"),
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


def test_one_attempt_is_enough_for_a_mean_and_pass_at_1() -> None:
    for objective in (Mean(), PassAtK(k=1), MaxOfK(k=1), LengthPenalty()):
        objective.check(1, 0.0)


# One problem, three genomes, one attempt each.
CORRECT = [[[0.0], [1.0], [1.0]]]
SHORT = [[[0.52], [0.51], [0.50]]]
SUM = [[[0.52], [1.51], [1.50]]]


def test_the_formula_on_literals() -> None:
    found = Gdpo(rewards=("correct", "short"), weights=(2.0, 0.5))(
        of(SUM, correct=CORRECT, short=SHORT)
    )
    # Means 2/3 and 0.51; deviations sqrt(2)/3 and 0.01 sqrt(2/3).
    z = math.sqrt(1.5)
    expected = [[-2 * math.sqrt(2) + 0.5 * z, math.sqrt(2), math.sqrt(2) - 0.5 * z]]
    assert found == pytest.approx(np.array(expected))


def test_attempts_are_averaged_before_genomes_are_compared() -> None:
    attempts = [[[0.0, 1.0], [1.0, 1.0]]]
    assert Gdpo(rewards=("a",))(of(attempts, a=attempts)).tolist() == [[-1.0, 1.0]]
    lost = [[[NAN, 1.0], [0.0, 1.0]]]
    assert Gdpo(rewards=("a",))(of(lost, a=lost)).tolist() == [[1.0, -1.0]]


def test_a_genome_whose_attempts_were_lost_has_no_score_and_moves_nobodys() -> None:
    rewards = [[[NAN], [0.0], [1.0]]]
    found = Gdpo(rewards=("a",))(of(rewards, a=rewards))
    assert found[0].tolist() == pytest.approx([NAN, -1.0, 1.0], nan_ok=True)


def test_a_reward_that_a_problem_does_not_have_adds_nothing_there() -> None:
    rewards = [[[0.0], [1.0]], [[0.0], [1.0]]]
    only_first = [[[0.0], [1.0]], [[NAN], [NAN]]]
    outcomes = of(rewards, exact=only_first, format=rewards)
    found = Gdpo(rewards=("exact", "format", "number"))(outcomes)
    assert found.tolist() == [[-2.0, 2.0], [-1.0, 1.0]]


def test_a_reward_that_no_env_reports_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"objective\.rewards must be one that the Envs report, "):
        Gdpo(rewards=("corect",))(of(SUM, correct=CORRECT))
    with pytest.raises(ConfigError, match=r"found 'corect': did you mean 'correct'\? Accepted: co"):
        Gdpo(rewards=("corect",))(of(SUM, correct=CORRECT))
    nobody = of([[[NAN], [NAN]]])
    assert np.isnan(Gdpo(rewards=("corect",))(nobody)).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rewards": ()}, "rewards must be names that differ, at least one, found ''"),
        ({"rewards": ("a", "a")}, "rewards must be names that differ, at least one, found 'a,a'"),
        ({"rewards": ("a",), "weights": (1.0, 2.0)}, "one for each of the 1 rewards, found 2"),
        ({"rewards": ("a",), "weights": (math.inf,)}, "weights must be finite"),
    ],
)
def test_rewards_that_cannot_be_added_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Gdpo(**options)


def test_lengths_move_only_the_reward_itself() -> None:
    with pytest.raises(ConfigError, match="inner counts the metric 'correct', 'format', on which"):
        LengthPenalty(inner=Gdpo())
    LengthPenalty(inner=Gdpo(rewards=("reward", "format")))


# --- numbers that follow results -----------------------------------------------------------------


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


finite = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(
    arrays.arrays(np.float64, (3, 4), elements=st.one_of(finite, st.just(NAN))),
    st.floats(0.001, 1000),
    st.integers(-1000, 1000),
)
def test_neither_scale_nor_offset_of_a_reward_matters(
    values_P_G: Any, scale: float, offset: int
) -> None:
    values_P_G = np.round(values_P_G, 3)
    found_P_G = normalised(values_P_G)
    assert np.isfinite(found_P_G).all()
    assert found_P_G.mean(axis=1) == pytest.approx(np.zeros(3), abs=1e-6)
    assert normalised(values_P_G * scale + offset) == pytest.approx(found_P_G, abs=1e-3)
