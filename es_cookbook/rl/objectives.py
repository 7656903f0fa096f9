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

Pitfall: the pass@k policy gradient has advantages for the tokens of solved and failed attempts.
They sum to zero over the attempts at a problem, so as one genome's fitness they carry no signal. An
evolution strategy needs a genome's own pass@k, compared with other genomes'.

Left out: a score from fewer than k attempts. It would be biased towards failure just where rollouts
were lost, so it is NaN and the problem is left out for that genome.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_types, in_range
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.registry import Registered
from es_cookbook.rl.rollouts import mean_over_attempts, rollout_metrics
from es_cookbook.rl.types import (
    EnvGroupBuilder,
    Metrics,
    SamplingParams,
    Tokenizer,
    TrajectoryGroup,
)

OBJECTIVE_NAMES = Registered("objectives")
"""Names on the command line."""
SURROGATE_NAMES = Registered("surrogates")
"""The same of surrogates."""
REWARD = "reward"
"""Names the reward itself in place of an Env metric."""
SOLVED = "correct"
"""The Env metric of whether an attempt solved its problem, where no other is named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcomes:
    """Rewards, sampled tokens and metrics of a batch, as problems x genomes x attempts.

    NaN where a rollout was lost, and where neither its Env nor its group reported the metric. For
    objectives that change over a run, `generation` is the batch's, and `solved_T` the mean share of
    rollouts that solved their problem in each generation before it, as recorded.
    """

    rewards_P_G_K: NDArray[np.float64]
    tokens_P_G_K: NDArray[np.float64]
    metrics: Mapping[str, NDArray[np.float64]]
    generation: int = 0
    solved_T: Sequence[float] = ()

    def values(self, metric: str, option: str) -> NDArray[np.float64]:
        """Return an Env metric, or the reward for `REWARD`; `option` is where the user named it.

        Raises:
            ConfigError: No Env reports it; names the nearest.
        """
        if metric == REWARD:
            return self.rewards_P_G_K
        if metric not in self.metrics:
            if np.isnan(self.rewards_P_G_K).all():  # No attempt reported it.
                return self.rewards_P_G_K
            raise ConfigError(
                f"{option} must be one that the Envs report, found {metric!r}: "
                f"{nearest(metric, [*self.metrics, REWARD])}"
            )
        return self.metrics[metric]


def outcomes(
    groups_P: Sequence[TrajectoryGroup], generation: int = 0, solved_T: Sequence[float] = ()
) -> Outcomes:
    """Return the outcomes of groups as arrays."""
    rewards_P_G_K = np.array([group.rewards_G_K for group in groups_P], dtype=np.float64)
    tokens_P_G_K = np.full(rewards_P_G_K.shape, np.nan)
    metrics: dict[str, NDArray[np.float64]] = {}
    for p, group in enumerate(groups_P):
        for (g, k), trajectory in group.finished:
            tokens_P_G_K[p, g, k] = trajectory.num_tokens
            for name, value in rollout_metrics(group, g, k).items():
                if name not in metrics:
                    metrics[name] = np.full(rewards_P_G_K.shape, np.nan)
                metrics[name][p, g, k] = value
    return Outcomes(rewards_P_G_K, tokens_P_G_K, metrics, generation, solved_T)


def pass_at_k(
    attempts: NDArray[np.int64], solved: NDArray[np.int64], k: int
) -> NDArray[np.float64]:
    """Estimate 1 − C(n − c, k)/C(n, k) for n attempts with c solved; NaN where n < k.

    As a product, so that no binomial coefficient is ever formed.

    >>> pass_at_k(np.array([4, 4, 4, 1]), np.array([0, 1, 3, 1]), k=2)
    array([0. , 0.5, 1. , nan])
    """
    none_solved = np.ones(np.shape(attempts))
    for i in range(k):
        none_solved *= np.maximum(attempts - solved - i, 0) / np.maximum(attempts - i, 1)
    return np.where(attempts >= k, 1 - none_solved, np.nan)


def max_of_k(rewards_P_G_K: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Estimate the expected maximum of k attempts without bias; NaN where fewer are left.

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

    _types = chz.validate(check_types)

    @property
    def counted(self) -> Sequence[str]:
        """Env metrics that it uses instead of rewards; none by default."""
        return ()

    @property
    def follows_results(self) -> bool:
        """Whether it, or one inside it, needs `Outcomes.solved_T`."""
        return any(part.follows_results for part in self._parts)

    @property
    def compares_genomes(self) -> bool:
        """Whether a score, its own or of one inside it, depends on other genomes' attempts."""
        return any(part.compares_genomes for part in self._parts)

    @property
    def _parts(self) -> Sequence["Objective"]:
        fields = (getattr(self, name) for name in chz.chz_fields(self))
        return [field for field in fields if isinstance(field, Objective)]

    def metrics(self, outcomes: Outcomes) -> Metrics:
        """Return metrics `objective/...` of a generation; none by default."""
        return {}

    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:  # noqa: B027 - most need none
        """Refuse a run in which attempts are too few, or all the same; by default none.

        `path` is the objective's, as a user types it.

        Raises:
            ConfigError: They are.
        """

    @abstractmethod
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Return `scores_P_G`, with NaN where too few attempts were left.

        Raises:
            ConfigError: A metric that no Env reports.
        """


@chz.chz
class Mean(Objective):
    """The mean reward over the attempts that were not lost."""

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return mean_over_attempts(outcomes.rewards_P_G_K)


@chz.chz
class MaxOfK(Objective):
    """The expected best reward of k attempts."""

    k: int = chz.field(default=4, doc="attempts of which the best counts")

    _k = in_range("k", at_least=1)

    @override
    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:
        if self.k > attempts:
            raise ConfigError(
                f"{path}.k={self.k} needs attempts={self.k} or more at each problem, found "
                f"attempts={attempts}"
            )
        if self.k > 1 and temperature == 0:
            raise ConfigError(
                f"{path}.k={self.k} needs attempts that differ, and greedy ones do not: set "
                "sampling.temperature above 0"
            )

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return max_of_k(outcomes.rewards_P_G_K, self.k)


@chz.chz
class PassAtK(MaxOfK):
    """The chance that at least one of k attempts solves the problem."""

    metric: str = chz.field(default=SOLVED, doc="Env metric that is 1 if solved, or reward itself")
    threshold: float = chz.field(default=1.0, doc="least metric of a solved attempt")

    _threshold = in_range("threshold")

    @property
    @override
    def counted(self) -> Sequence[str]:
        return () if self.metric == REWARD else (self.metric,)

    def solved(self, outcomes: Outcomes) -> NDArray[np.bool_]:
        """Return whether each attempt solved its problem, `solved_P_G_K`; False for lost ones.

        Raises:
            ConfigError: No Env reports the metric.
        """
        present_P_G_K = ~np.isnan(outcomes.rewards_P_G_K)
        values_P_G_K = outcomes.values(self.metric, "objective.metric")
        return (values_P_G_K >= self.threshold) & present_P_G_K

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        attempts_P_G = (~np.isnan(outcomes.rewards_P_G_K)).sum(axis=2)
        return pass_at_k(attempts_P_G, self.solved(outcomes).sum(axis=2), self.k)


@chz.chz
class AnswerSource(ABC):
    """The answers that genomes score instead of sampling."""

    _types = chz.validate(check_types)

    attempts: int = chz.field(doc="answers of the centre to each problem of a batch")

    def tokens_read(self, answer: float, gold: float) -> float:
        """Return the tokens of answers to a problem that a genome scores, at most.

        Args:
            answer: mean tokens of the centre's answers.
            gold: mean tokens of gold answers.
        """
        return self.attempts * answer

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the centre's sampling parameters, given the run's; the same by default.

        Raises:
            ConfigError: It cannot.
        """
        return sampling

    def check(self, batch_P: Sequence[EnvGroupBuilder]) -> None:  # noqa: B027 - the centre answers any
        """Refuse problems without such answers, before any is attempted.

        Raises:
            DataError: Names the problem.
        """

    async def check_fit(  # noqa: B027 - the centre's answers do
        self, problems_P: Sequence[EnvGroupBuilder], tokenizer: Tokenizer, context_length: int
    ) -> None:
        """Refuse answers that do not fit into the engine's context, before the first generation.

        Raises:
            DataError: Names the problem.
        """

    @abstractmethod
    async def problem(
        self, asked: EnvGroupBuilder, answered: TrajectoryGroup, tokenizer: Tokenizer
    ) -> EnvGroupBuilder:
        """Return the answers that genomes score in place of a problem, as a problem.

        Args:
            asked: the problem.
            answered: the centre's attempts at it, with log-probabilities.
            tokenizer: the engine's.

        Raises:
            DataError: There is nothing to score; names the problem.
        """
