"""Intervals hold the truth as often as they say, and the formulas give known values."""

import math

import numpy as np
import pytest

from es_cookbook.population.results import (
    bootstrap_interval,
    mcnemar,
    paired_bootstrap,
    share_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # Newcombe 1998 (Stat. Med. 17, 857-872), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_gives_the_published_intervals(
    successes: int, count: int, low: float, high: float
) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("attempts", [1, 2, 8])
@pytest.mark.parametrize(
    ("share", "problems"), [(0.02, 30), (0.03, 100), (0.97, 100), (0.5, 20), (0.2, 12)]
)
@pytest.mark.parametrize("spread", [0.3, 3.0, 100.0])
def test_a_share_of_several_attempts_is_held(
    share: float, problems: int, spread: float, attempts: int
) -> None:
    """Of problems whose own shares differ much (0.3) or hardly at all."""
    rng = np.random.default_rng(problems)
    held: list[bool] = []
    for _ in range(400):
        own_P = rng.beta(spread * share, spread * (1 - share), problems)
        values_P = rng.binomial(attempts, own_P) / attempts
        low, high = share_interval(values_P, attempts=problems * attempts)
        held.append(low <= share <= high)
    assert np.mean(held) >= 0.91


@pytest.mark.parametrize(("fixed", "broken"), [(0.0, 0.0), (0.03, 0.0), (0.1, 0.05), (0.4, 0.1)])
@pytest.mark.parametrize("problems", [20, 100])
def test_a_difference_of_shares_is_held(fixed: float, broken: float, problems: int) -> None:
    rng = np.random.default_rng(problems)
    held: list[bool] = []
    for _ in range(400):
        kinds_P = rng.choice(3, problems, p=[1 - fixed - broken, fixed, broken])
        first_P, second_P = (kinds_P == 1).astype(float), (kinds_P == 2).astype(float)
        low, high = paired_bootstrap(first_P, second_P, 0)
        held.append(low <= fixed - broken <= high)
    assert np.mean(held) >= 0.92 and high > low


def test_attempts_of_problems_that_are_all_alike_count_by_their_number() -> None:
    assert share_interval(np.full(10, 0.5), attempts=80) == pytest.approx(wilson_interval(40, 80))
    assert share_interval(np.zeros(10), attempts=80) == pytest.approx(wilson_interval(0, 10))
    assert share_interval(np.array([1.0, 0.0, 1.0])) == pytest.approx(wilson_interval(2, 3))
    doubled = share_interval(np.array([1.0, 0.0]), np.array([2.0, 2.0]))
    assert doubled == share_interval(np.array([1.0, 0.0]))
    assert share_interval(np.array([])) == (0.0, 1.0)


def test_problems_that_differ_from_most_are_worth_part_of_their_variance() -> None:
    # m = 11/16; v = 27/256; n = m (1 - m) · 3 / v = 55/9; two differ: 4 + 2 / 6 · (55/9 - 4).
    found = share_interval(np.array([1.0, 1.0, 0.5, 0.25]), attempts=40)
    assert found == pytest.approx(wilson_interval(11 / 16 * 127 / 27, 127 / 27))


def test_the_bootstrap_of_a_normal_sample_is_the_textbooks() -> None:
    values_P = np.random.default_rng(2).normal(5.0, 2.0, 400)
    found = bootstrap_interval(values_P, seed=0)
    half = 1.96 * values_P.std() / math.sqrt(400)
    expected = (values_P.mean() - half, values_P.mean() + half)
    assert found == pytest.approx(expected, abs=0.01)
    assert found == bootstrap_interval(values_P, seed=0) != bootstrap_interval(values_P, seed=1)


def test_mcnemar_gives_the_published_p_and_is_exact_for_many() -> None:
    # Agresti 2002, Categorical Data Analysis, 10.1.1: 86 against 150 of 1600, z² = 17.36.
    assert mcnemar(86, 150) == pytest.approx(3.716e-5, rel=1e-3)
    assert mcnemar(0, 5) == 0.0625
    assert mcnemar(8, 8) == 1.0
    assert 0 < mcnemar(2000, 2200) < 0.01
    assert mcnemar(0, 5000) == 0.0, "too small for a float"
