"""Intervals hold the truth as often as they say, and the formulas give known values."""

import math

import numpy as np
import pytest

from es_cookbook.population.statistics import (
    bootstrap_interval,
    mcnemar,
    paired_bootstrap,
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
    found = wilson_interval(successes, count)
    assert (found.low, found.high) == (
        pytest.approx(low, abs=5e-5),
        pytest.approx(high, abs=5e-5),
    )


def test_wilson_refuses_what_is_no_count() -> None:
    with pytest.raises(ValueError, match="from 0 to count=3, found 4"):
        wilson_interval(4, 3)


def test_wilson_holds_the_share_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for share, count in ((0.5, 30), (0.9, 50), (0.03, 200)):
        held = [
            found.low <= share <= found.high
            for successes in rng.binomial(count, share, 4000)
            for found in [wilson_interval(int(successes), count)]
        ]
        assert np.mean(held) == pytest.approx(0.95, abs=0.025), (share, count)


def test_the_bootstrap_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    means = [bootstrap_interval(rng.exponential(2.0, 50), seed) for seed in range(200)]
    held = np.mean([found.low <= 2.0 <= found.high for found in means])
    assert held == pytest.approx(0.935, abs=0.035), "a skew of 2 costs a percent or so"


def test_the_bootstrap_of_a_normal_sample_is_the_textbooks() -> None:
    values_P = np.random.default_rng(2).normal(5.0, 2.0, 400)
    found = bootstrap_interval(values_P, seed=0)
    half = 1.96 * values_P.std() / math.sqrt(400)
    assert found.low == pytest.approx(values_P.mean() - half, abs=0.02)
    assert found.high == pytest.approx(values_P.mean() + half, abs=0.02)
    assert found == bootstrap_interval(values_P, seed=0) != bootstrap_interval(values_P, seed=1)


def test_a_weight_counts_as_so_many_values() -> None:
    rng = np.random.default_rng(3)
    values_P, weights_P = rng.normal(size=300), np.array([1.0, 3.0] * 150)
    found = bootstrap_interval(values_P, 0, weights_P)
    mean = (values_P * weights_P).sum() / weights_P.sum()
    assert (found.low + found.high) / 2 == pytest.approx(mean, abs=0.02)
    assert found != bootstrap_interval(values_P, 0)


def test_without_spread_or_values_there_is_nothing_to_resample() -> None:
    alike = bootstrap_interval(np.full(7, 0.1), 0)
    assert (alike.low, alike.high) == (0.1, 0.1)
    assert math.isnan(bootstrap_interval(np.array([]), 0).low)


def test_many_values_are_resampled_in_parts() -> None:
    values_P = np.random.default_rng(4).normal(size=5000)
    found = bootstrap_interval(values_P, 0)
    assert found.high - found.low == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.05)


def test_a_paired_bootstrap_is_of_the_differences() -> None:
    rng = np.random.default_rng(5)
    first_P = rng.normal(0.0, 10.0, 200)
    found = paired_bootstrap(first_P + rng.normal(1.0, 0.1, 200), first_P, 0)
    assert 0.95 < found.low < 1.0 < found.high < 1.05, "the problems' own spread cancels"


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
