"""What attempts at problems came to, problem by problem, and how sure the means over them are.

The problems are a sample of all that could have been asked, so intervals are over problems. Where a
problem was attempted once and a metric is 0 or 1 everywhere, the interval is Wilson's, else a
bootstrap (`population.statistics`). Two evaluations of the same problems are compared problem by
problem: most of the spread is in the problems, and cancels.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.population.statistics import (
    RESAMPLES,
    bootstrap_interval,
    mcnemar,
    paired_bootstrap,
    share_interval,
)
from es_cookbook.rl.objectives import REWARD, SOLVED, Outcomes, PassAtK, outcomes
from es_cookbook.rl.rollouts import mean_over_attempts
from es_cookbook.rl.types import ANSWER, EnvGroupBuilder, LostRollout, TrajectoryGroup

VOTE = "vote"
"""The metric of the answer that most attempts give."""
_SOLVED = (SOLVED, "solved")
"""Metrics that say whether a problem was solved, the first that is there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, and where it lies with a confidence of 95 %.

    Attributes:
        problems: how many it is over.
        is_share: whether every attempt had 0 or 1.
        answers: how many attempts it is over: those that reported the metric.
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
    """Two evaluations on the problems of which both know the metric.

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
        names_P: what each problem is called.
        tags_P: under which tags each counts.
        outcomes: rewards and metrics, of one genome.
        lost_P: why attempts were lost, of each problem.
        answers_P: of each attempt, what its task read as the answer; None where it read none.
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
        """Says whether a problem was solved; None where Envs report nothing of that name."""
        return next((name for name in _SOLVED if name in self.outcomes.metrics), None)

    @property
    def lost(self) -> Counter[str]:
        """Why attempts were lost, and how many for each reason."""
        return Counter(reason for lost in self.lost_P for reason in lost)

    @property
    def can_vote(self) -> bool:
        """Whether any attempt has an answer that can be compared with others'."""
        return any(answer is not None for answers in self.answers_P for answer in answers)

    def values(self, metric: str) -> NDArray[np.float64]:
        """`values_P_K`; NaN where an attempt was lost or did not report the metric.

        Raises:
            ConfigError: No attempt reported it; names the nearest.
        """
        return self.outcomes.values(metric, "metric")[:, 0, :]

    def estimate(
        self,
        metric: str,
        seed: int = 0,
        tag: str | None = None,
        resamples: int = RESAMPLES,
    ) -> Estimate:
        """The mean of a metric over all problems, or those with a tag; NaN without any.

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
        is_share = bool(np.isin(present, (0.0, 1.0)).all()) and len(present) > 0
        value = _mean(means_P if metric == REWARD else present)
        weights_P = None if metric == REWARD or len(set(counts_P)) == 1 else counts_P
        if is_share:
            low, high = share_interval(means_P, weights_P, len(present))
            return Estimate(value, low, high, "Wilson", len(means_P), is_share, len(present))
        low, high = bootstrap_interval(means_P, _seed(seed), weights_P, resamples)
        return Estimate(value, low, high, "bootstrap", len(means_P), is_share, len(present))

    def pass_at(self, k: int, metric: str = SOLVED) -> Estimate:
        """The chance that one of k attempts solves a problem, over problems with k attempts left.

        An attempt solves it whose metric is 1 or more.

        Raises:
            ConfigError: No attempt reported the metric.
        """
        scores_P = PassAtK(k=k, metric=metric)(self.outcomes)[:, 0]
        return self._estimate_of_shares(scores_P[~np.isnan(scores_P)])

    def majority_at(self, k: int, metric: str = SOLVED) -> Estimate:
        """The metric of the answer that most of k attempts give (maj@k), over all problems.

        The mean over as many separate sets of k attempts as there are, one after the other.

        Raises:
            ConfigError: No attempt reported the metric.
        """
        values_P = majorities(self.answers_P, self.values(metric), k)
        return self._estimate_of_shares(values_P)

    def _estimate_of_shares(self, values_P: NDArray[np.float64]) -> Estimate:
        answers = int((~np.isnan(self.outcomes.rewards_P_G_K)).sum())
        low, high = share_interval(values_P, attempts=answers)
        return Estimate(_mean(values_P), low, high, "Wilson", len(values_P), True, answers)

    def voted(self, metric: str) -> "Results":
        """The same with the metric `VOTE`: that of the answer that most of the attempts give."""
        values_P_K = self.values(metric)
        votes_P = majorities(self.answers_P, values_P_K, self.attempts)
        votes_P_G_K = np.broadcast_to(votes_P[:, None, None], self.outcomes.rewards_P_G_K.shape)
        metrics = {**self.outcomes.metrics, VOTE: votes_P_G_K}
        return dataclasses.replace(
            self, outcomes=dataclasses.replace(self.outcomes, metrics=metrics)
        )


def majorities(
    answers_P: Sequence[Sequence[str | None]], values_P_K: NDArray[np.float64], k: int
) -> NDArray[np.float64]:
    """What the answer that most of k attempts give is worth, at each problem.

    Attempts without an answer do not vote. Of answers with equally many votes each counts alike,
    and where there is none the problem is worth 0.

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
    """The results of one policy's rollouts of these problems."""
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
    """What each is called; its number where it has no name."""
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
    """How much better the first is than the second, on the same problems.

    Args:
        first: results of one policy.
        second: results of another.
        metric: that both reported.
        seed: of the bootstrap.
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


def _means(values_P_K: NDArray[np.float64]) -> NDArray[np.float64]:
    """A problem's mean over the attempts that have a value; NaN without any."""
    return mean_over_attempts(values_P_K[:, None, :])[:, 0]


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan


def _seed(seed: int) -> int:
    return derive_seed(seed, "bootstrap")
