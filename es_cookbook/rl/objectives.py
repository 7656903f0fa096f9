"""Objectives: one score from a genome's K attempts at a problem.

The rewards of the attempts, `rewards_P_G_K`, become one score per genome and problem, `scores_P_G`,
which fitness then centres per problem over the genomes: the baseline. With attempts n that were not
lost, c of them solved, and rewards in ascending order r(1) ≤ … ≤ r(n):

    mean        Σ r(i) / n, the chance of solving at the first attempt
    pass_at_k   1 − C(n − c, k) / C(n, k), the chance that one of k attempts solves it
    max_of_k    Σ C(i − 1, k − 1) / C(n, k) · r(i), the expected best reward of k attempts

The second is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), the third the same for
rewards that are not 0 or 1, by order statistics: the best of k of the n attempts, averaged over all
choices of k. Both use all n attempts, so n above k lowers their variance; with n = k a pass@k is 0
or 1, the noisiest estimate there is. Attempts must differ to be useful: temperature above 0.

Pitfall: the pass@k policy gradient has advantages for the tokens of solved and failed attempts,
A⁺ = (1 − ρ)/s and A⁻ = (1 − ρ − C(n − c − 1, k − 1)/C(n − 1, k − 1))/s with ρ = pass@k and
s = √(ρ(1 − ρ)). They sum to zero over the attempts at a problem, so as one genome's fitness they
are no signal. An evolution strategy needs a genome's own pass@k, compared with other genomes'.

Left out: a score from fewer than k attempts. It would be biased towards failure just where rollouts
were lost, so it is NaN and the problem is left out for that genome.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.fields.parts import parts
from es_cookbook.rl.rewards.length import (
    STRENGTH,
    dynamic_fractions,
    normalised_fractions,
    penalised,
)
from es_cookbook.rl.rollouts import mean_over_attempts, rollout_metrics
from es_cookbook.rl.types import Metrics, Trajectory, TrajectoryGroup

OBJECTIVE_NAMES = {
    "mean": "es_cookbook.rl.objectives:Mean",
    "pass_at_k": "es_cookbook.rl.objectives:PassAtK",
    "max_of_k": "es_cookbook.rl.objectives:MaxOfK",
    "length_penalty": "es_cookbook.rl.objectives:LengthPenalty",
    "gdpo": "es_cookbook.rl.gdpo:Gdpo",
    "reward_schedule": "es_cookbook.rl.reward_schedule:RewardSchedule",
}
"""What a user types on the command line."""
REWARD = "reward"
"""Names the reward itself in place of an Env metric."""
SOLVED = "correct"
"""The Env metric of whether an attempt solved its problem, where no other is named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcomes:
    """Rewards, sampled tokens and metrics of a batch, as problems x genomes x attempts.

    NaN where a rollout was lost, and where neither its Env nor its group reported the metric.
    `generation` is the batch's, for objectives that change over a run.
    """

    rewards_P_G_K: NDArray[np.float64]
    tokens_P_G_K: NDArray[np.float64]
    metrics: Mapping[str, NDArray[np.float64]]
    generation: int = 0

    @property
    def lost_P_G(self) -> NDArray[np.bool_]:
        """Where a genome lost all its attempts at a problem."""
        return np.asarray(np.isnan(self.rewards_P_G_K).all(axis=2))

    def solved(self, metric: str, threshold: float) -> NDArray[np.bool_]:
        """Which attempts reach `threshold` in an Env metric, or in the reward if it is `REWARD`.

        Raises:
            ConfigError: No Env reports it; names the nearest.
        """
        return self.values(metric, "objective.metric") >= threshold

    def values(self, metric: str, option: str) -> NDArray[np.float64]:
        """An Env metric, or the reward if it is `REWARD`; `option` is where the user named it.

        Raises:
            ConfigError: No Env reports it; names the nearest.
        """
        if metric == REWARD:
            return self.rewards_P_G_K
        if metric not in self.metrics:
            if np.isnan(self.rewards_P_G_K).all():  # Nobody was there to report it.
                return self.rewards_P_G_K
            raise ConfigError(
                f"{option} must be one that the Envs report, found {metric!r}: "
                f"{nearest(metric, [*self.metrics, REWARD])}"
            )
        return self.metrics[metric]


def solved_in(metrics: Metrics) -> float:
    """Whether an attempt solved its problem, as its Env says; NaN where that says nothing."""
    return metrics.get(SOLVED, metrics.get("solved", math.nan))


def check_weighted(rewards: Sequence[str], **weights: Sequence[float]) -> None:
    """Refuse metrics that are to be added, or lists of their weights, that cannot be used.

    Raises:
        ConfigError: Which, by its name.
    """
    if not rewards or len(set(rewards)) < len(rewards):
        raise ConfigError(
            f"rewards must be names that differ, at least one, found {','.join(rewards)!r}"
        )
    for name, values in weights.items():
        if len(values) != len(rewards):
            raise ConfigError(
                f"{name} must be one for each of the {len(rewards)} rewards, found {len(values)}"
            )
        if not all(map(math.isfinite, values)):
            raise ConfigError(f"{name} must be finite, found {values}")


def outcomes(groups_P: Sequence[TrajectoryGroup], generation: int = 0) -> Outcomes:
    """Groups as arrays."""
    rewards_P_G_K = np.array([group.rewards_G_K for group in groups_P], dtype=np.float64)
    tokens_P_G_K = np.full(rewards_P_G_K.shape, np.nan)
    metrics: dict[str, NDArray[np.float64]] = {}
    for p, group in enumerate(groups_P):
        for g, trajectories_K in enumerate(group.trajectories_G_K):
            for k, trajectory in enumerate(trajectories_K):
                if not isinstance(trajectory, Trajectory):
                    continue
                tokens_P_G_K[p, g, k] = trajectory.num_tokens
                for name, value in rollout_metrics(group, g, k).items():
                    if name not in metrics:
                        metrics[name] = np.full(rewards_P_G_K.shape, np.nan)
                    metrics[name][p, g, k] = value
    return Outcomes(rewards_P_G_K, tokens_P_G_K, metrics, generation)


def pass_at_k(
    attempts: NDArray[np.int64], solved: NDArray[np.int64], k: int
) -> NDArray[np.float64]:
    """Unbiased 1 − C(n − c, k)/C(n, k) of n attempts with c solved; NaN where n < k.

    As a product, so that no binomial coefficient is ever formed.

    >>> pass_at_k(np.array([4, 4, 4, 1]), np.array([0, 1, 3, 1]), k=2)
    array([0. , 0.5, 1. , nan])
    """
    none_solved = np.ones(np.shape(attempts))
    for i in range(k):
        none_solved *= np.maximum(attempts - solved - i, 0) / np.maximum(attempts - i, 1)
    return np.where(attempts >= k, 1 - none_solved, np.nan)


def max_of_k(rewards_P_G_K: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Unbiased expected maximum of k of the attempts that were not lost; NaN where there are fewer.

    >>> max_of_k(np.array([[[0.0, 3.0, 1.0], [5.0, np.nan, 7.0]]]), k=2)
    array([[2.33333333, 7.        ]])
    """
    ascending_P_G_K = np.sort(rewards_P_G_K, axis=2)  # Lost ones last.
    attempts_P_G = (~np.isnan(rewards_P_G_K)).sum(axis=2)
    scores_P_G = np.full(attempts_P_G.shape, np.nan)
    for n in range(k, rewards_P_G_K.shape[2] + 1):
        weights = np.zeros(n)
        weights[n - 1] = k / n
        for i in range(n - 1, k - 1, -1):
            weights[i - 1] = weights[i] * (i + 1 - k) / i
        ascending = ascending_P_G_K[attempts_P_G == n][:, :n]
        # Above the lowest, so that equal rewards have exactly themselves as their maximum.
        lowest = ascending[:, :1]
        scores_P_G[attempts_P_G == n] = lowest[:, 0] + ((ascending - lowest) * weights).sum(axis=1)
    return scores_P_G


@chz.chz
class Objective(ABC):
    """Turns a genome's attempts at a problem into one score."""

    @property
    def min_attempts(self) -> int:
        """Fewest attempts of a genome at a problem."""
        return 1

    @property
    def counted(self) -> Sequence[str]:
        """Env metrics that it counts in place of the rewards, none by default."""
        return ()

    def options(self, path: str = "objective") -> str:
        """What makes `min_attempts` what it is, as a user types it; `path` is the objective's."""
        return f"{path}={type(self).__name__}"

    def check(self, attempts: int, temperature: float) -> None:
        """Refuse a run in which attempts are too few, or all the same.

        Raises:
            ConfigError: They are.
        """
        if self.min_attempts > attempts:
            raise ConfigError(
                f"{self.options()} needs attempts={self.min_attempts} or more of a genome at a "
                f"problem, found attempts={attempts}"
            )
        if self.min_attempts > 1 and temperature == 0:
            raise ConfigError(
                f"{self.options()} needs attempts that differ, and greedy ones do not: set "
                "sampling.temperature above 0"
            )

    @abstractmethod
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """`scores_P_G`; NaN where too few attempts were left.

        Raises:
            ConfigError: A metric that no Env reports.
        """


parts(Objective, *OBJECTIVE_NAMES.values())


@chz.chz
class Mean(Objective):
    """The mean reward over the attempts that were not lost."""

    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Means."""
        return mean_over_attempts(outcomes.rewards_P_G_K)


@chz.chz
class PassAtK(Objective):
    """The chance that at least one of k attempts solves the problem."""

    k: int = chz.field(default=4, doc="attempts of which at least one must solve the problem")
    metric: str = chz.field(
        default=SOLVED, doc="Env metric of whether an attempt solved it; reward: the reward itself"
    )
    threshold: float = chz.field(default=1.0, doc="least metric of a solved attempt")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "k", at_least=1)
        check_range(self, "threshold")

    @property
    def min_attempts(self) -> int:
        """As many as are asked about."""
        return self.k

    @property
    @override
    def counted(self) -> Sequence[str]:
        return () if self.metric == REWARD else (self.metric,)

    @override
    def options(self, path: str = "objective") -> str:
        return f"{path}.k={self.k}"

    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Unbiased pass@k."""
        present_P_G_K = ~np.isnan(outcomes.rewards_P_G_K)
        solved_P_G_K = outcomes.solved(self.metric, self.threshold)
        return pass_at_k(
            present_P_G_K.sum(axis=2), (solved_P_G_K & present_P_G_K).sum(axis=2), self.k
        )


@chz.chz
class MaxOfK(Objective):
    """The expected best reward of k attempts."""

    k: int = chz.field(default=4, doc="attempts of which the best counts")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "k", at_least=1)

    @property
    def min_attempts(self) -> int:
        """As many as are asked about."""
        return self.k

    @override
    def options(self, path: str = "objective") -> str:
        return f"{path}.k={self.k}"

    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Unbiased expected maxima."""
        return max_of_k(outcomes.rewards_P_G_K, self.k)


_INNER = Names(OBJECTIVE_NAMES, default="mean")


@chz.chz
class LengthPenalty(Objective):
    """Another objective over rewards adjusted by length (`rl.rewards.length`).

    Length is in sampled tokens. Without a limit an answer is long or short among all attempts of
    all genomes at its problem, since problems need answers of different lengths.
    """

    limit: int | None = chz.field(
        default=None,
        doc="tokens at which an answer is fully long; None: relative to the problem's answers",
    )
    strength: float = chz.field(default=STRENGTH, doc="share of the reward that length can change")
    right_above: float = chz.field(
        default=0.9, doc="answers are right, and should be short, if their reward is above this"
    )
    inner: Objective = chz.field(
        meta_factory=_INNER, default_factory=_INNER.build_default, doc="of the adjusted rewards"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "limit", at_least=1)
        check_range(self, "strength", at_least=0, at_most=1)
        check_range(self, "right_above")
        if counted := self.inner.counted:
            raise ConfigError(
                f"inner counts the metric {', '.join(map(repr, counted))}, on which a length "
                "penalty has no effect; use inner=max_of_k, or inner.metric=reward, or with gdpo "
                "inner.rewards=reward,..."
            )

    @property
    def min_attempts(self) -> int:
        """As many as the other objective needs."""
        return self.inner.min_attempts

    @override
    def options(self, path: str = "objective") -> str:
        return self.inner.options(f"{path}.inner")

    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Scores of the adjusted rewards."""
        lengths_P_G_K = outcomes.tokens_P_G_K
        if self.limit is None:
            fractions_P_G_K = np.stack([normalised_fractions(of_p) for of_p in lengths_P_G_K])
        else:
            fractions_P_G_K = dynamic_fractions(lengths_P_G_K, self.limit)
        rewards_P_G_K = outcomes.rewards_P_G_K
        is_right_P_G_K = rewards_P_G_K > self.right_above
        moved_P_G_K = penalised(rewards_P_G_K, is_right_P_G_K, fractions_P_G_K, self.strength)
        return self.inner(dataclasses.replace(outcomes, rewards_P_G_K=moved_P_G_K))
