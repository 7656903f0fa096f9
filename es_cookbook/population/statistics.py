"""How sure a measured mean is, and whether two differ: intervals and one test, on plain arrays.

    wilson_interval      a share of successes: the score interval of Wilson 1927 (J. Am. Stat.
                         Assoc. 22, 209-212), which is good for few, none or all
    share_interval       the same of several attempts at each problem: Wilson's, of as many
                         independent attempts as these are worth, which are alike at one problem
                         (Korn and Graubard 1998, Survey Methodology 24, 193-201)
    bootstrap_interval   a mean of anything: percentiles of the means of resamples (Efron 1979,
                         Ann. Stat. 7, 1-26), drawn from the problems
    paired_bootstrap     a mean difference on the same problems: a bootstrap of the differences; of
                         shares the interval of Agresti and Min 2005 (Biostatistics 6, 28-43)
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


def wilson_interval(successes: float, count: float) -> Interval:
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


def share_interval(
    values_P: NDArray[np.float64],
    weights_P: NDArray[np.float64] | None = None,
    attempts: float = math.inf,
) -> Interval:
    """The interval of a share, given that of each problem.

    As many independent attempts have the variance that the mean has by its problems:

        n = m (1 - m) / v,   v = Σ (w / Σ w)² (x - m)² · P / (P - 1)

    at least as many as there are problems, which is what all that failed are worth, or all that did
    not. Of what is above that only a part counts, since few problems that differ from most say
    little of the variance: r / (r + 4) with r of them, by which 95 % cover in simulations.

    Args:
        values_P: shares of a problem's attempts, in [0, 1].
        weights_P: what each counts in the mean, above 0; all alike if None.
        attempts: that there were in all; n is no more.

    >>> low, high = share_interval(np.zeros(20))
    >>> low, round(high, 3)
    (0.0, 0.161)
    """
    if len(values_P) == 0:
        return wilson_interval(0, 0)
    weights_P = np.ones(len(values_P)) if weights_P is None else weights_P
    shares_P = weights_P / weights_P.sum()
    mean, problems = min(1.0, float(shares_P @ values_P)), 1 / float(shares_P @ shares_P)
    if values_P.min() == values_P.max():  # Which rounding would hide.
        mean = float(values_P[0])
    differ = len(values_P) - int(np.unique(values_P, return_counts=True)[1].max())
    if not differ:
        count = problems if mean in (0.0, 1.0) else max(attempts, problems)
    else:
        variance = float(shares_P**2 @ (values_P - mean) ** 2) * len(values_P)
        worth = min(mean * (1 - mean) * (len(values_P) - 1) / variance, attempts)
        count = problems + differ / (differ + 4) * max(0.0, worth - problems)
    return (mean, mean) if math.isinf(count) else wilson_interval(mean * count, count)


def bootstrap_interval(
    values_P: NDArray[np.float64],
    seed: int,
    weights_P: NDArray[np.float64] | None = None,
    resamples: int = RESAMPLES,
) -> Interval:
    """The interval of a mean over problems; NaN without any. Of zeros and ones `share_interval`.

    Args:
        values_P: a value per problem, none NaN.
        seed: the same gives the same interval.
        weights_P: what each counts in the mean, above 0; all alike if None.
        resamples: drawn; fewer are faster, and the ends less exact.
    """
    if len(values_P) == 0:
        return math.nan, math.nan
    if np.isin(values_P, (0.0, 1.0)).all():
        return share_interval(values_P, weights_P)
    return _bootstrap(values_P, seed, weights_P, resamples)


def _bootstrap(
    values_P: NDArray[np.float64],
    seed: int,
    weights_P: NDArray[np.float64] | None = None,
    resamples: int = RESAMPLES,
) -> Interval:
    if values_P.min() == values_P.max():  # So is every mean, which rounding would hide.
        return float(values_P[0]), float(values_P[0])
    means = _resampled_means(values_P, np.random.default_rng(seed), weights_P, resamples)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_bootstrap(
    first_P: NDArray[np.float64], second_P: NDArray[np.float64], seed: int
) -> Interval:
    """The interval of the mean of `first_P - second_P`, two values of the same problems.

    Where all of them are shares, half a problem is added to each way in which two can differ, and
    to each in which they can be the same: few or no changes do not make sure that there are none.
    """
    if len(first_P) == 0:
        return math.nan, math.nan
    changes_P = first_P - second_P
    values = np.concatenate((first_P, second_P))
    if values.min() < 0 or values.max() > 1:
        return _bootstrap(changes_P, seed)
    count = len(changes_P) + 2
    mean = float(changes_P.sum()) / count
    variance = (float((changes_P**2).sum()) + 1) / count - mean**2
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(variance / count)
    return max(mean - half, -1.0), min(mean + half, 1.0)


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
