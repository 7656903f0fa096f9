"""Results of attempts at problems, means over them, and confidence intervals.

The problems are a sample of all that could have been asked, so intervals are over problems. Where a
problem was attempted once and a metric is 0 or 1 everywhere, the interval is Wilson's, else a
bootstrap. Two evaluations of the same problems are compared problem by
problem: most of the spread is in the problems, and cancels.

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
the percentiles lie too close together, and reports should say so. scipy has all four, but nothing
else here needs its 110 MB.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.objectives import REWARD, SOLVED, Outcomes, PassAtK, outcomes
from es_cookbook.rl.rollouts import mean_over_attempts
from es_cookbook.rl.types import ANSWER, EnvGroupBuilder, LostRollout, TrajectoryGroup

CONFIDENCE = 0.95
RESAMPLES = 10_000
FEW = 30
"""Fewest values for a bootstrap; with fewer its intervals are too narrow."""
Interval: TypeAlias = tuple[float, float]
"""The 95 % confidence interval of a mean."""
_AT_ONCE = 4_000_000
"""Drawn numbers that are in memory together: 32 MB."""


def wilson_interval(successes: float, count: float) -> Interval:
    """Return the interval of a share: `successes` of `count` independent problems.

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
    """Return the interval of a share, given that of each problem.

    As many independent attempts have the variance that the mean has by its problems:

        n = m (1 - m) / v,   v = Σ (w / Σ w)² (x - m)² · P / (P - 1)

    at least as many as there are problems, the value if all attempts failed, or none did. Only a
    part of the excess counts, since few problems that differ from most say little about the
    variance: r / (r + 4) with r of them, by which 95 % cover in simulations.

    Args:
        values_P: shares of a problem's attempts, in [0, 1].
        weights_P: weight of each in the mean, above 0; all alike if None.
        attempts: number of attempts in all; n is at most this.

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
    values_P: NDArray[np.float64], seed: int, resamples: int = RESAMPLES
) -> Interval:
    """Return the interval of a mean over problems; NaN without any.

    Args:
        values_P: a value per problem, none NaN.
        seed: the same gives the same interval.
        resamples: drawn; fewer are faster, and the ends less exact.
    """
    if len(values_P) == 0:
        return math.nan, math.nan
    if values_P.min() == values_P.max():  # So is every mean, which rounding would hide.
        return float(values_P[0]), float(values_P[0])
    rng, count = np.random.default_rng(seed), len(values_P)
    at_once = max(1, _AT_ONCE // count)
    means = [
        values_P[rng.integers(0, count, size=(min(at_once, resamples - i), count))].mean(axis=1)
        for i in range(0, resamples, at_once)
    ]
    ends = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(ends[0]), float(ends[1])


def paired_bootstrap(
    first_P: NDArray[np.float64], second_P: NDArray[np.float64], seed: int
) -> Interval:
    """Return the interval of the mean of `first_P - second_P` on the same problems.

    Where all of them are shares, half a problem is added to each way in which two can differ, and
    to each in which they can be the same: few or no changes do not make sure that there are none.
    """
    if len(first_P) == 0:
        return math.nan, math.nan
    changes_P = first_P - second_P
    values = np.concatenate((first_P, second_P))
    if values.min() < 0 or values.max() > 1:
        return bootstrap_interval(changes_P, seed)
    count = len(changes_P) + 2
    mean = float(changes_P.sum()) / count
    variance = (float((changes_P**2).sum()) + 1) / count - mean**2
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(variance / count)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def mcnemar(fixed: int, broken: int) -> float:
    """Return the probability of a split at least as uneven if both directions are equally likely.

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


VOTE = "vote"
"""The metric of the answer that most attempts give."""
_SOLVED = (SOLVED, "solved")
"""Metrics that say whether a problem was solved, the first that is there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, and where it lies with a confidence of 95 %.

    Attributes:
        problems: number of problems in the mean.
        is_share: whether every attempt had 0 or 1.
        answers: number of attempts in the mean: those that reported the metric.
    """

    value: float
    low: float
    high: float
    method: Literal["Wilson", "bootstrap"]
    problems: int
    is_share: bool
    answers: int


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations, compared on the problems that have the metric in both.

    A problem's value is the mean over its attempts. `p` is McNemar's, exact; where values are not 0
    or 1, that is the sign test.
    """

    metric: str
    problems: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    better: int
    worse: int
    p: float
    is_share: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """All attempts of one policy at some problems.

    Attributes:
        names_P: name of each problem.
        tags_P: tags of each.
        outcomes: rewards and metrics, of one genome.
        lost_P: reasons of each problem's lost attempts.
        answers_P: answer that the task read, for each attempt; None without one.
    """

    names_P: Sequence[str]
    tags_P: Sequence[tuple[str, ...]]
    outcomes: Outcomes
    lost_P: Sequence[Sequence[str]]
    answers_P: Sequence[Sequence[str | None]] = ()

    @property
    def attempts(self) -> int:
        return self.outcomes.rewards_P_G_K.shape[2]

    @property
    def metrics(self) -> list[str]:
        return [REWARD, *sorted(self.outcomes.metrics)]

    @property
    def tags(self) -> list[str]:
        return sorted({tag for tags in self.tags_P for tag in tags})

    @property
    def solved_metric(self) -> str | None:
        """The metric that says whether a problem was solved.

        It is one that Envs report, or else the reward where that is 0 or 1; None without either.
        """
        rewarded = REWARD if _is_share(self.outcomes.rewards_P_G_K) else None
        return next((name for name in _SOLVED if name in self.outcomes.metrics), rewarded)

    @property
    def lost(self) -> Counter[str]:
        """Number of lost attempts by reason."""
        return Counter(reason for lost in self.lost_P for reason in lost)

    @property
    def can_vote(self) -> bool:
        """Whether any attempt has an answer that can be compared with others'."""
        return any(answer is not None for answers in self.answers_P for answer in answers)

    def values(self, metric: str) -> NDArray[np.float64]:
        """Return `values_P_K`, with NaN where an attempt was lost or did not report the metric.

        Raises:
            ConfigError: No attempt reported it; names the nearest.
        """
        return self.outcomes.values(metric, "metric")[:, 0, :]

    def estimate(
        self, metric: str, seed: int = 0, tag: str | None = None, resamples: int = RESAMPLES
    ) -> Estimate:
        """Estimate the mean of a metric over all problems, or those with a tag; NaN without any.

        As `evaluate` reports it: of the reward the mean of the problems' means, of others the mean
        over attempts.

        Raises:
            ConfigError: No attempt reported the metric.
        """
        values_P_K = self.values(metric)
        if tag is not None:
            values_P_K = values_P_K[[tag in tags for tags in self.tags_P]]
        counts_P = (~np.isnan(values_P_K)).sum(axis=1).astype(np.float64)
        values_P_K, counts_P = values_P_K[counts_P > 0], counts_P[counts_P > 0]
        means_P = _means(values_P_K)
        present = values_P_K[~np.isnan(values_P_K)]
        is_share = _is_share(present)
        value = _mean(means_P if metric == REWARD else present)
        if is_share:
            weights_P = None if metric == REWARD or len(set(counts_P)) == 1 else counts_P
            low, high = share_interval(means_P, weights_P, len(present))
            return Estimate(value, low, high, "Wilson", len(means_P), is_share, len(present))
        low, high = bootstrap_interval(means_P, _seed(seed), resamples)
        return Estimate(value, low, high, "bootstrap", len(means_P), is_share, len(present))

    def pass_at(self, k: int, metric: str = SOLVED) -> Estimate:
        """Estimate the chance that one of k attempts solves a problem.

        It is over the problems that have k attempts left.

        An attempt solves it whose metric is 1 or more.

        Raises:
            ConfigError: No attempt reported the metric.
        """
        scores_P = PassAtK(k=k, metric=metric)(self.outcomes)[:, 0]
        return self._estimate_of_shares(scores_P[~np.isnan(scores_P)])

    def majority_at(self, k: int, metric: str = SOLVED) -> Estimate:
        """Estimate the metric of the answer that most of k attempts give (maj@k), over problems.

        The mean over as many separate sets of k attempts as there are, one after the other.

        Raises:
            ConfigError: No attempt reported the metric.
        """
        return self._estimate_of_shares(majorities(self.answers_P, self.values(metric), k))

    def at_ks(self, metric: str | None = None) -> dict[str, Estimate]:
        """Estimate pass@k and, where attempts have answers, maj@k, for each k of `ks_of`.

        Of `solved_metric` if none is given; nothing without one, or of single attempts. maj@k from
        3 on, because a majority of two is both or either.

        Raises:
            ConfigError: No attempt reported the metric.
        """
        metric, ks = metric or self.solved_metric, ks_of(self.attempts)
        if metric is None or self.attempts == 1:
            return {}
        found = {f"pass@{k}": self.pass_at(k, metric) for k in ks}
        if self.can_vote:
            found |= {f"maj@{k}": self.majority_at(k, metric) for k in ks if k > 2}
        return found

    def _estimate_of_shares(self, values_P: NDArray[np.float64]) -> Estimate:
        answers = int((~np.isnan(self.outcomes.rewards_P_G_K)).sum())
        low, high = share_interval(values_P, attempts=answers)
        return Estimate(_mean(values_P), low, high, "Wilson", len(values_P), True, answers)

    def voted(self, metric: str) -> "Results":
        """Add the metric `VOTE`: that of the answer that most of the attempts give."""
        votes_P = majorities(self.answers_P, self.values(metric), self.attempts)
        votes_P_G_K = np.broadcast_to(votes_P[:, None, None], self.outcomes.rewards_P_G_K.shape)
        metrics = {**self.outcomes.metrics, VOTE: votes_P_G_K}
        return dataclasses.replace(
            self, outcomes=dataclasses.replace(self.outcomes, metrics=metrics)
        )


def majorities(
    answers_P: Sequence[Sequence[str | None]], values_P_K: NDArray[np.float64], k: int
) -> NDArray[np.float64]:
    """Return the value of the majority's answer among k attempts, for each problem.

    Attempts without an answer do not vote. Answers with equally many votes count alike;
    without any the problem is worth 0.

    >>> values = np.array([[0.0, 1.0, 1.0, 0.0]])
    >>> majorities([["4", "7", "7", None]], values, 4)
    array([1.])
    >>> majorities([["4", "7", "7", "5"]], values, 2)
    array([0.5])
    """

    def worth(answers: Sequence[str | None], values: NDArray[np.float64]) -> float:
        votes = Counter(answer for answer in answers if answer is not None)
        most = max(votes.values(), default=0)
        of_winners = [
            value
            for answer, value in zip(answers, values.tolist(), strict=True)
            if answer is not None and votes[answer] == most and not math.isnan(value)
        ]
        return math.fsum(of_winners) / len(of_winners) if of_winners else 0.0

    starts = range(0, values_P_K.shape[1] - k + 1, k)
    return np.array(
        [
            math.fsum(worth(answers[i : i + k], values_K[i : i + k]) for i in starts) / len(starts)
            for answers, values_K in zip(answers_P, values_P_K, strict=True)
        ]
    )


def results_of(
    env_group_builders_P: Sequence[EnvGroupBuilder], groups_P: Sequence[TrajectoryGroup]
) -> Results:
    """Collect the results of one policy's rollouts of these problems."""
    return Results(
        names_P=problem_names(env_group_builders_P),
        tags_P=[group.tags for group in groups_P],
        outcomes=outcomes(groups_P),
        lost_P=[
            [t.reason for t in group.trajectories_G_K[0] if isinstance(t, LostRollout)]
            for group in groups_P
        ],
        answers_P=[
            [
                None if isinstance(t, LostRollout) else t.transitions[-1].logs.get(ANSWER)
                for t in group.trajectories_G_K[0]
            ]
            for group in groups_P
        ],
    )


def problem_names(env_group_builders_P: Sequence[EnvGroupBuilder]) -> list[str]:
    """Return the name of each problem; its number if it has none."""
    return [
        str(getattr(builder, "name", "") or f"problem {p}")
        for p, builder in enumerate(env_group_builders_P)
    ]


def check_same_problems(first_P: Sequence[str], second_P: Sequence[str]) -> None:
    """Refuse problems of other names.

    Raises:
        ConfigError: Says where they differ.
    """
    for p, (one, other) in enumerate(zip(first_P, second_P, strict=False)):
        if one != other:
            raise ConfigError(
                f"two evaluations of different problems cannot be compared: problem {p} is "
                f"{one!r:.80} of one and {other!r:.80} of the other"
            )
    if len(first_P) != len(second_P):
        raise ConfigError(
            "two evaluations of different problems cannot be compared: one has "
            f"{len(first_P)} and the other {len(second_P)}"
        )


def compare(
    first: Results,
    second: Results,
    metric: str,
    seed: int = 0,
    problems: Sequence[int] | None = None,
) -> Comparison:
    """Measure the improvement of the first over the second, on the same problems.

    Args:
        first: results of one policy.
        second: results of another.
        metric: a metric that both reported.
        seed: seed of the bootstrap.
        problems: indices of the problems to compare; None: all.

    Raises:
        ConfigError: They are of other problems, or one did not report the metric.
    """
    check_same_problems(first.names_P, second.names_P)
    chosen = slice(None) if problems is None else list(problems)
    values = [results.values(metric)[chosen] for results in (first, second)]
    first_P, second_P = (_means(values_P_K) for values_P_K in values)
    both = ~np.isnan(first_P) & ~np.isnan(second_P)
    first_P, second_P = first_P[both], second_P[both]
    low, high = paired_bootstrap(first_P, second_P, _seed(seed))
    better, worse = int((first_P > second_P).sum()), int((first_P < second_P).sum())
    return Comparison(
        metric=metric,
        problems=len(first_P),
        first=_mean(first_P),
        second=_mean(second_P),
        difference=_mean(first_P - second_P),
        low=low,
        high=high,
        better=better,
        worse=worse,
        p=mcnemar(better, worse),
        is_share=all(bool(np.isin(v[~np.isnan(v)], (0.0, 1.0)).all()) for v in values),
    )


def ks_of(attempts: int) -> list[int]:
    """Return the k of pass@k: powers of two up to the attempts, and all of them."""
    return list(dict.fromkeys((*(2**power for power in range(attempts.bit_length())), attempts)))


def _is_share(values: NDArray[np.float64]) -> bool:
    present = values[~np.isnan(values)]
    return bool(np.isin(present, (0.0, 1.0)).all()) and len(present) > 0


def _means(values_P_K: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each problem's mean over the attempts that have a value; NaN without any."""
    return mean_over_attempts(values_P_K[:, None, :])[:, 0]


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan


def _seed(seed: int) -> int:
    return derive_seed(seed, "bootstrap")
