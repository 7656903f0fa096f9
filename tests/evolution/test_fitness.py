"""Fitness carries the signal of the rewards and nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from es_cookbook.evolution.fitness import (
    CentredRank,
    Fitness,
    PerProblemBaseline,
    Raw,
    ZScore,
    reliability,
)

NAN = math.nan
ALL = [ZScore(), CentredRank(), Raw(), PerProblemBaseline()]
each = pytest.mark.parametrize("fitness", ALL, ids=lambda fitness: type(fitness).__name__)


def array(*rows: list[float]) -> NDArray[np.float64]:
    return np.array(rows, dtype=np.float64)


@pytest.mark.parametrize(
    ("fitness", "expected_G"),
    [
        (Raw(), [-1, 0, 1]),
        (ZScore(), [-math.sqrt(1.5), 0, math.sqrt(1.5)]),
        (CentredRank(), [-0.5, 0, 0.5]),
        (PerProblemBaseline(), [-1, 0, 1]),  # All rewards: three 0s and three 2s, deviation 1.
    ],
)
def test_literal_values(fitness: Fitness, expected_G: list[float]) -> None:
    assert fitness(array([0, 0, 2], [0, 2, 2])) == pytest.approx(expected_G)


def test_ties_share_their_average_rank() -> None:
    assert CentredRank()(array([7, 1, 7, 9, 0])).tolist() == [0.125, -0.25, 0.125, 0.5, -0.5]


def test_the_per_problem_baseline_is_scaled_by_all_rewards_not_by_their_means() -> None:
    # Every genome solves one of two problems, one solves both: means 1/2, 1/2, 1.
    rewards_P_G = array([1, 0, 1], [0, 1, 1])
    deviation = np.array([1, 0, 1, 0, 1, 1]).std()
    expected_G = np.array([-1 / 6, -1 / 6, 1 / 3]) / deviation
    assert PerProblemBaseline()(rewards_P_G) == pytest.approx(expected_G)


@each
@pytest.mark.parametrize(
    "rewards_P_G",
    [
        array([0.1, 0.1, 0.1], [0.7, 0.7, 0.7], [1 / 3, 1 / 3, 1 / 3]),
        array([0.1, 0.1, NAN], [0.7, NAN, 0.7], [1 / 3, 1 / 3, 1 / 3]),
        array([0.1, 0.2, 0.3], [0.2, 0.3, 0.1], [0.3, 0.1, 0.2]),  # Equal sums in another order.
        array([1e300, 1e300]),
        array([5]),
        np.zeros((4, 6)),
    ],
    ids=["equal", "equal, some lost", "another order", "huge", "one genome", "zeros"],
)
def test_no_signal_is_exactly_zero(fitness: Fitness, rewards_P_G: NDArray[np.float64]) -> None:
    assert fitness(rewards_P_G).tolist() == [0.0] * rewards_P_G.shape[1]


@each
def test_rounding_is_no_signal(fitness: Fitness) -> None:
    """0.1 + 0.5, 0.2 + 0.4 and 0.3 + 0.3 are not the same number, also beside a lost genome."""
    rewards_P_G = array([0.1, 0.2, 0.3, NAN], [0.5, 0.4, 0.3, NAN])
    assert fitness(rewards_P_G)[:3].tolist() == [0.0] * 3


@each
def test_those_that_say_so_have_unit_variance_wherever_there_is_a_signal(fitness: Fitness) -> None:
    rewards = np.random.default_rng(0).normal(size=(20, 3, 7)) ** 3
    are_units = [fitness(rewards_P_G).std() == pytest.approx(1) for rewards_P_G in rewards]
    assert all(are_units) == fitness.has_unit_variance


@each
def test_a_genome_that_lost_everything_is_nan_and_changes_nothing_for_the_others(
    fitness: Fitness,
) -> None:
    with_lost_G = fitness(array([1, NAN, 2, 4], [0, NAN, 1, 0]))
    without_G = fitness(array([1, 2, 4], [0, 1, 0]))
    assert math.isnan(with_lost_G[1])
    assert with_lost_G[[0, 2, 3]].tolist() == without_G.tolist()


@each
def test_all_lost_or_no_problems_gives_nan_for_all(fitness: Fitness) -> None:
    assert np.isnan(fitness(np.full((2, 3), NAN))).all()
    assert np.isnan(fitness(np.empty((0, 3)))).all()


@st.composite
def rewards(draw: st.DrawFn, lost: bool = True) -> NDArray[np.float64]:
    """Small multiples of 1/4, so that shifts and scales by powers of two are exact."""
    shape = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    quarters = st.integers(-20, 20).map(lambda n: n / 4)
    element = quarters | st.just(NAN) if lost else quarters
    size = shape[0] * shape[1]
    flat = draw(st.lists(element, min_size=size, max_size=size))
    return np.array(flat, dtype=np.float64).reshape(shape)


@given(st.sampled_from(ALL), rewards(), st.data())
def test_the_order_of_genomes_and_of_problems_does_not_matter(
    fitness: Fitness, rewards_P_G: NDArray[np.float64], data: st.DataObject
) -> None:
    order_P = data.draw(st.permutations(range(rewards_P_G.shape[0])))
    order_G = data.draw(st.permutations(range(rewards_P_G.shape[1])))
    shuffled_G = fitness(rewards_P_G[order_P][:, order_G])
    np.testing.assert_allclose(shuffled_G, fitness(rewards_P_G)[order_G], atol=1e-12)


@given(st.sampled_from([ZScore(), CentredRank(), Raw()]), rewards(), st.data())
def test_making_a_problem_easier_for_everyone_changes_nothing(
    fitness: Fitness, rewards_P_G: NDArray[np.float64], data: st.DataObject
) -> None:
    n = len(rewards_P_G)
    shift_P = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=n, max_size=n)))
    shifted_G = fitness(rewards_P_G + shift_P[:, None])
    np.testing.assert_allclose(shifted_G, fitness(rewards_P_G), atol=1e-12)


@given(st.sampled_from(ALL), rewards(), st.sampled_from([0.25, 8.0, 2.0**-900, 2.0**900]))
def test_the_unit_of_reward_does_not_matter(
    fitness: Fitness, rewards_P_G: NDArray[np.float64], scale: float
) -> None:
    unit = scale if isinstance(fitness, Raw) else 1.0
    np.testing.assert_allclose(
        fitness(rewards_P_G * scale), fitness(rewards_P_G) * unit, rtol=1e-12, atol=1e-12 * unit
    )


@each
def test_a_weight_of_zero_changes_nothing_to_the_bit(fitness: Fitness) -> None:
    rewards_P_G = array([0.1, 0.7, NAN, 0.3], [1 / 3, 0.2, 0.9, NAN])
    alone_G = fitness(rewards_P_G)
    measured_only = [(0.0, array([5, NAN, 1, 2])), (0.0, array([NAN] * 4))]
    assert fitness(rewards_P_G, measured_only).tobytes() == alone_G.tobytes()


def test_who_lost_all_of_the_others_is_average_there_and_who_lost_the_main_ones_is_left_out() -> (
    None
):
    others = [(1.0, array([NAN, 2, 0]))]
    assert Raw()(array([1, 1, 1]), others).tolist() == [0, 1, -1]
    assert np.isnan(Raw()(array([1, 1, NAN]), others)).tolist() == [False, False, True]


@each
def test_what_cancels_up_to_rounding_is_no_signal(fitness: Fitness) -> None:
    rewards_P_G = array([0.1, 0.2, 0.7], [0.3, 0.6, 0.1])
    against = [(1 / 3, -3 * rewards_P_G)]
    assert fitness(rewards_P_G, against).tolist() == [0, 0, 0]


def test_reliability_is_one_where_problems_agree_and_zero_where_they_say_nothing() -> None:
    agreeing = np.array([[0.0, 1.0, 0.5]]) + np.array([[0.0], [3.0], [-1.0]])  # harder and easier
    assert reliability(agreeing) == pytest.approx(1.0)
    assert reliability(np.zeros((4, 5))) == 0.0
    assert reliability(np.array([[1.0, 2.0]])) == 0.0  # one problem cannot agree with itself
    assert reliability(np.full((3, 2), NAN)) == 0.0
    assert reliability(np.array([[1.0, NAN], [NAN, 2.0]])) == 0.0
