"""How sure a measured mean is, and whether two differ: intervals and one test, on plain arrays.

    wilson_interval      a share of successes: the score interval of Wilson 1927 (J. Am. Stat.
                         Assoc. 22, 209-212), which is good for few, none or all
    bootstrap_interval   a mean of anything: percentiles of the means of resamples (Efron 1979,
                         Ann. Stat. 7, 1-26), drawn from the problems and not from the attempts,
                         since attempts at one problem are alike
    paired_bootstrap     a mean difference on the same problems: a bootstrap of the differences
    mcnemar              whether as many problems were fixed as broken: the test of McNemar 1947
                         (Psychometrika 12, 153-157) in its exact form, which is the sign test

The unbiased estimate of pass@k (Chen et al. 2021) is `rl.objectives.pass_at_k`. Left out:
bootstraps with a correction (BCa), which a few hundred problems do not need; with fewer than `FEW`
the percentiles lie too close together, and whoever shows them should say so. scipy has all four,
but nothing else here needs its 110 MB.
"""

import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
FEW = 30
"""With fewer values a bootstrap is too sure of itself."""
Interval: TypeAlias = tuple[float, float]
"""Between which numbers a mean lies with a confidence of 95 %."""
_AT_ONCE = 4_000_000
"""Drawn numbers that are in memory together: 32 MB."""


def wilson_interval(successes: int, count: int) -> Interval:
    """The interval of a share: `successes` of `count` independent problems.

    >>> low, high = wilson_interval(0, 10)
    >>> low, round(high, 4)
    (0.0, 0.2775)
    >>> wilson_interval(0, 0)
    (0.0, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, of_z = successes / count, z * z / count
    middle = (share + of_z / 2) / (1 + of_z)
    half = z * math.sqrt(share * (1 - share) / count + of_z / (4 * count)) / (1 + of_z)
    # At the ends the formula gives the end itself, up to rounding.
    low = 0.0 if successes == 0 else middle - half
    return low, 1.0 if successes == count else middle + half


def bootstrap_interval(
    values_P: NDArray[np.float64],
    seed: int,
    weights_P: NDArray[np.float64] | None = None,
    resamples: int = RESAMPLES,
) -> Interval:
    """The interval of a mean over problems; NaN without any.

    Args:
        values_P: a value per problem, none NaN.
        seed: the same gives the same interval.
        weights_P: what each counts in the mean, above 0; all alike if None.
        resamples: drawn; fewer are faster, and the ends less exact.
    """
    if len(values_P) == 0:
        return math.nan, math.nan
    if values_P.min() == values_P.max():  # So is every mean, which rounding would hide.
        return float(values_P[0]), float(values_P[0])
    means = _resampled_means(values_P, np.random.default_rng(seed), weights_P, resamples)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_bootstrap(
    first_P: NDArray[np.float64], second_P: NDArray[np.float64], seed: int
) -> Interval:
    """The interval of the mean of `first_P - second_P`, two values of the same problems."""
    return bootstrap_interval(first_P - second_P, seed)


def mcnemar(fixed: int, broken: int) -> float:
    """The chance of a split at least as uneven if each changed problem went either way alike.

    Two-sided; problems that did not change say nothing.

    >>> mcnemar(0, 0), mcnemar(1, 5), mcnemar(5, 1)
    (1.0, 0.21875, 0.21875)
    """
    changed = fixed + broken
    tail = ways = 1  # Of choosing i of the changed problems, summed over i.
    for i in range(min(fixed, broken)):
        ways = ways * (changed - i) // (i + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**changed)


def _resampled_means(
    values_P: NDArray[np.float64],
    rng: np.random.Generator,
    weights_P: NDArray[np.float64] | None,
    resamples: int,
) -> NDArray[np.float64]:
    count = len(values_P)
    at_once = max(1, _AT_ONCE // count)
    parts: list[NDArray[np.float64]] = []
    for first in range(0, resamples, at_once):
        drawn = rng.integers(0, count, size=(min(at_once, resamples - first), count))
        if weights_P is None:
            parts.append(values_P[drawn].mean(axis=1))
        else:
            totals = (values_P * weights_P)[drawn].sum(axis=1)
            parts.append(totals / weights_P[drawn].sum(axis=1))
    return np.concatenate(parts)
