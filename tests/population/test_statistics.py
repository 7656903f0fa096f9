"""Intervals hold the truth as often as they say, and the formulas give known values."""

import math

import numpy as np
import pytest

from es_cookbook.population.statistics import bootstrap_interval, mcnemar, wilson_interval


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


def test_wilson_holds_the_share_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for share, count in ((0.5, 30), (0.9, 50), (0.03, 200)):
        found = [wilson_interval(int(n), count) for n in rng.binomial(count, share, 4000)]
        held = [low <= share <= high for low, high in found]
        assert np.mean(held) == pytest.approx(0.95, abs=0.025), (share, count)


def test_the_bootstrap_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    means = [bootstrap_interval(rng.exponential(2.0, 50), seed) for seed in range(200)]
    held = np.mean([low <= 2.0 <= high for low, high in means])
    assert held == pytest.approx(0.935, abs=0.035), "a skew of 2 costs a percent or so"


def test_the_bootstrap_of_a_normal_sample_is_the_textbooks() -> None:
    values_P = np.random.default_rng(2).normal(5.0, 2.0, 400)
    found = bootstrap_interval(values_P, seed=0)
    half = 1.96 * values_P.std() / math.sqrt(400)
    expected = (values_P.mean() - half, values_P.mean() + half)
    assert found == pytest.approx(expected, abs=0.02)
    assert found == bootstrap_interval(values_P, seed=0) != bootstrap_interval(values_P, seed=1)


def test_a_weight_counts_as_so_many_values() -> None:
    rng = np.random.default_rng(3)
    values_P, weights_P = rng.normal(size=300), np.array([1.0, 3.0] * 150)
    found = bootstrap_interval(values_P, 0, weights_P)
    mean = (values_P * weights_P).sum() / weights_P.sum()
    assert sum(found) / 2 == pytest.approx(mean, abs=0.02)
    assert found != bootstrap_interval(values_P, 0)


def test_without_spread_or_values_there_is_nothing_to_resample() -> None:
    assert bootstrap_interval(np.full(7, 0.1), 0) == (0.1, 0.1)
    assert math.isnan(bootstrap_interval(np.array([]), 0)[0])


def test_many_values_are_resampled_in_parts() -> None:
    values_P = np.random.default_rng(4).normal(size=5000)
    low, high = bootstrap_interval(values_P, 0)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.05)


def test_mcnemar_gives_the_published_p_and_is_exact_for_many() -> None:
    # Agresti 2002, Categorical Data Analysis, 10.1.1: 86 against 150 of 1600, z² = 17.36.
    assert mcnemar(86, 150) == pytest.approx(3.716e-5, rel=1e-3)
    assert mcnemar(0, 5) == 0.0625
    assert mcnemar(8, 8) == 1.0
    assert 0 < mcnemar(2000, 2200) < 0.01
    assert mcnemar(0, 5000) == 0.0, "too small for a float"


def test_mcnemar_is_wrong_no_more_often_than_it_says() -> None:
    fixed = np.random.default_rng(6).binomial(40, 0.5, 4000)
    share = np.mean([mcnemar(int(f), 40 - int(f)) <= 0.05 for f in fixed])
    assert 0.02 < share <= 0.05
