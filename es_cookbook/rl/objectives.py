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

Pitfall: the pass@k policy gradient has advantages for the tokens of solved and failed attempts
(`pass_at_k_advantages`). They sum to zero over the attempts at a problem, so as one genome's
fitness they are no signal. An evolution strategy needs a genome's own pass@k, compared with other
genomes'.

Left out: a score from fewer than k attempts. It would be biased towards failure just where rollouts
were lost, so it is NaN and the problem is left out for that genome.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.fields.parts import plugs_in
from es_cookbook.common.names import Names
from es_cookbook.common.registry import Registered
from es_cookbook.rl.rewards.base import REWARD_NAMES, check_weights
from es_cookbook.rl.rewards.length import (
    STRENGTH,
    dynamic_fractions,
    normalised_fractions,
    penalised,
)
from es_cookbook.rl.rollouts import mean_of, mean_over_attempts, rollout_metrics
from es_cookbook.rl.types import Metrics, Trajectory, TrajectoryGroup

OBJECTIVE_NAMES = Registered("objectives")
"""What a user types on the command line."""
REWARD = "reward"
"""Names the reward itself in place of an Env metric."""
SOLVED = "correct"
"""The Env metric of whether an attempt solved its problem, where no other is named."""
TIE = 1e-12
"""Rewards closer together than this share of the largest count as equal."""


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


def outcomes(
    groups_P: Sequence[TrajectoryGroup], generation: int = 0, solved_T: Sequence[float] = ()
) -> Outcomes:
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
    return Outcomes(rewards_P_G_K, tokens_P_G_K, metrics, generation, solved_T)


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


def pass_at_k_advantages(
    solved_K: Sequence[bool], k: int, *, normalise: bool = True
) -> list[float]:
    """Weights of the answers to one problem in the policy gradient of pass@k.

    Chen et al. 2025 (arXiv:2508.10751), from n answers of which c solve the problem, with the mean
    ρ and the standard deviation s of "one of them solves it" over all groups of k answers:

        ρ = 1 − C(n − c, k)/C(n, k),   s = √(ρ(1 − ρ))
        solved: (1 − ρ)/s,   failed: (1 − ρ − C(n − c − 1, k − 1)/C(n − 1, k − 1))/s

    That is a group's baseline: an answer is worth the share solved of the groups that it is in,
    which is 1 for a solved one, and pass@(k − 1) of all others for a failed one. Without
    `normalise` nothing is divided by s. All are 0 where s is, and where n < k.

    >>> pass_at_k_advantages([True, False, False, False], k=2)
    [1.0, -0.333..., -0.333..., -0.333...]
    """
    n, c = len(solved_K), sum(solved_K)
    if n < k:
        return [0.0] * n
    of_all, of_failed = (
        float(pass_at_k(np.array(attempts), np.array(c), size))
        for attempts, size in ((n, k), (n - 1, k - 1))
    )
    deviation = math.sqrt(of_all * (1 - of_all))
    scale = deviation if normalise else 1.0
    values_K = (1.0 if solved else of_failed for solved in solved_K)
    return [(value - of_all) / scale if deviation else 0.0 for value in values_K]


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
    def counted(self) -> Sequence[str]:
        """Env metrics that it counts in place of the rewards, none by default."""
        return ()

    @property
    def follows_results(self) -> bool:
        """Whether it, or one inside it, needs `Outcomes.solved_T`."""
        parts = (getattr(self, name) for name in chz.chz_fields(self))
        return any(isinstance(part, Objective) and part.follows_results for part in parts)

    def metrics(self, outcomes: Outcomes) -> Metrics:
        """Numbers to report of a generation, `objective/...`; by default none."""
        del outcomes
        return {}

    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:
        """Refuse a run in which attempts are too few, or all the same; by default none.

        `path` is the objective's, as a user types it.

        Raises:
            ConfigError: They are.
        """
        del attempts, temperature, path

    @abstractmethod
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """`scores_P_G`; NaN where too few attempts were left.

        Raises:
            ConfigError: A metric that no Env reports.
        """


plugs_in(Objective, "objectives")


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

    @chz.validate
    def _k(self) -> None:
        check_range(self, "k", at_least=1)

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

    metric: str = chz.field(
        default=SOLVED, doc="Env metric of whether an attempt solved it; reward: the reward itself"
    )
    threshold: float = chz.field(default=1.0, doc="least metric of a solved attempt")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "threshold")

    @property
    @override
    def counted(self) -> Sequence[str]:
        return () if self.metric == REWARD else (self.metric,)

    def solved(self, outcomes: Outcomes) -> NDArray[np.bool_]:
        """Whether each attempt solved its problem, `solved_P_G_K`; no lost one did.

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
    inner: Objective = Names(OBJECTIVE_NAMES, default="mean").field("of the adjusted rewards")

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

    @override
    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:
        self.inner.check(attempts, temperature, f"{path}.inner")

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        lengths_P_G_K = outcomes.tokens_P_G_K
        if self.limit is None:
            fractions_P_G_K = np.stack([normalised_fractions(of_p) for of_p in lengths_P_G_K])
        else:
            fractions_P_G_K = dynamic_fractions(lengths_P_G_K, self.limit)
        rewards_P_G_K = outcomes.rewards_P_G_K
        is_right_P_G_K = rewards_P_G_K > self.right_above
        moved_P_G_K = penalised(rewards_P_G_K, is_right_P_G_K, fractions_P_G_K, self.strength)
        return self.inner(dataclasses.replace(outcomes, rewards_P_G_K=moved_P_G_K))


@chz.chz
class _WeightedMetrics(Objective):
    """A weighted sum of rewards, which are metrics that the Envs report by name.

    So any Env that reports its parts will do. A reward that a problem's Env does not report adds 0:
    rows may have different rewards. The Env's own sum only says which rollouts were lost.
    """

    rewards: tuple[str, ...] = chz.field(doc="Env metrics that are rewards")

    @chz.validate
    def _differ(self) -> None:
        if not self.rewards or len(set(self.rewards)) < len(self.rewards):
            raise ConfigError(
                f"rewards must be names that differ, at least one, found {','.join(self.rewards)!r}"
            )

    @property
    @override
    def counted(self) -> Sequence[str]:
        return () if REWARD in self.rewards else self.rewards

    def summed(
        self,
        outcomes: Outcomes,
        weights: Sequence[float],
        scored: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        """Σ weight · scored(a genome's means over its attempts); NaN where all were lost."""
        scores_P_G = np.zeros(outcomes.rewards_P_G_K.shape[:2])
        for name, weight in zip(self.rewards, weights, strict=True):
            if name in REWARD_NAMES and name not in outcomes.metrics:
                continue  # A shared reward, of rows that are not in this batch.
            means_P_G = mean_over_attempts(outcomes.values(name, "objective.rewards"))
            scores_P_G += weight * scored(means_P_G)
        all_lost_P_G = np.isnan(outcomes.rewards_P_G_K).all(axis=2)
        return np.where(all_lost_P_G, np.nan, scores_P_G)


@chz.chz
class Gdpo(_WeightedMetrics):
    """Several rewards, each normalised over the genomes of a problem before they are added.

        score = Σ_k w_k · (r_k − mean(r_k)) / std(r_k)

    with r_k the mean of reward k over a genome's attempts at a problem, and mean and standard
    deviation over all genomes at it, as in GDPO (Liu et al. 2026, arXiv:2601.05242), there over the
    answers of a group. A plain sum is governed by the reward that differs most: where half of the
    answers are right and the lengths differ by a percent, length has no say, whatever its weight.
    Here the weights alone say what counts. GDPO's second step, dividing by the standard deviation
    over the batch, is what `fitness=zscore` does.

    Pitfall: each problem and each reward gets the same spread, however little the genomes differ: a
    single genome that solves a problem scores √(G − 1) there. Rewards that are mostly luck gain by
    it.
    """

    rewards: tuple[str, ...] = chz.field(
        default=("correct", "format"), doc="Env metrics that are rewards"
    )
    weights: tuple[float, ...] = chz.field(
        default=(), doc="one for each of the rewards; none: 1 each"
    )

    @chz.validate
    def _weights(self) -> None:
        if self.weights:
            check_weights(self.rewards, weights=self.weights)

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return self.summed(outcomes, self.weights or (1.0,) * len(self.rewards), normalised)


def normalised(values_P_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """z-scores over the genomes at each problem; 0 where all are the same, and for NaN.

    >>> normalised(np.array([[1.0, 3.0, np.nan], [5.0, 5.0, 5.0]]))
    array([[-1.,  1.,  0.],
           [ 0.,  0.,  0.]])
    """
    scores_P_G = np.zeros(values_P_G.shape)
    for p, values_G in enumerate(values_P_G):
        present_G = ~np.isnan(values_G)
        values = values_G[present_G]
        if len(values) and float(np.ptp(values)) > TIE * float(np.abs(values).max()):
            scores_P_G[p, present_G] = (values - values.mean()) / values.std()
    return scores_P_G


@chz.chz
class RewardSchedule(_WeightedMetrics):
    """A sum of rewards whose weights change over the run: form first, then what is right, say.

        score = Σ_k w_k(t) · mean(r_k),   w_k(t) = start_k + (final_k − start_k) · min(t / over, 1)

    with t the generation and r_k the rewards of a genome's attempts at a problem.
    """

    rewards: tuple[str, ...] = chz.field(
        default=("format", "correct"), doc="Env metrics that are rewards"
    )
    start: tuple[float, ...] = chz.field(
        default=(1.0, 0.0), doc="weight of each in the first generation"
    )
    final: tuple[float, ...] = chz.field(
        default=(0.1, 0.9), doc="weight of each from generation `over` on"
    )
    over: int = chz.field(default=20, doc="generations over which the weights change")

    @chz.validate
    def _weights(self) -> None:
        check_range(self, "over", at_least=1)
        check_weights(self.rewards, start=self.start, final=self.final)

    def weights(self, generation: int) -> tuple[float, ...]:
        """Of each reward in a generation.

        >>> RewardSchedule(start=(1.0, 0.0), final=(0.0, 1.0), over=4).weights(1)
        (0.75, 0.25)
        """
        done = min(generation / self.over, 1.0)
        pairs = zip(self.start, self.final, strict=True)
        return tuple(start + (final - start) * done for start, final in pairs)

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return self.summed(outcomes, self.weights(outcomes.generation), np.nan_to_num)


@chz.chz
class ByPerformance(Objective):
    """An objective whose numbers follow what was solved lately: a curriculum of the reward.

        x = (1 − d) · first_x + d · last_x,   d = (share − low) / (high − low), within 0 and 1

    for every option x in which `first` and `last` differ: weights, thresholds, limits of length.
    `share` is the mean share of rollouts that solved their problem, by the metric `SOLVED` or else
    by the reward, over the last `window` generations; before the first it is 0. A mixture with a
    curriculum, filter or replay measures it by its `solved_metric`.

    The history records the shares of each generation. So d follows from the history, and a run that
    was interrupted goes on with the same.

    Pitfall: scores under different options do not compare; what was learned shows in Env metrics.
    """

    first: Objective = Names(OBJECTIVE_NAMES, default=None).field(
        "objective while little is solved"
    )
    last: Objective = Names(OBJECTIVE_NAMES, default=None).field(
        "the same with other numbers, once much is solved"
    )
    low: float = chz.field(default=0.2, doc="share solved up to which it is `first`")
    high: float = chz.field(default=0.8, doc="share solved from which on it is `last`")
    window: int = chz.field(default=5, doc="generations whose share solved counts")

    @chz.validate
    def _options(self) -> None:
        check_range(self, "low", "high")
        check_range(self, "high", above=self.low)
        check_range(self, "window", at_least=1)
        if type(self.first) is not type(self.last) or self.first == self.last:
            raise ConfigError(
                "first and last must be the same objective with different numbers, such as "
                "first=length_penalty first.limit=256 last=length_penalty last.limit=64; found "
                f"{self.first} and {self.last}"
            )
        self.at(0.5)

    @property
    @override
    def follows_results(self) -> bool:
        return True

    @property
    @override
    def counted(self) -> Sequence[str]:
        return self.first.counted

    @override
    def check(self, attempts: int, temperature: float, path: str = "objective") -> None:
        self.first.check(attempts, temperature, f"{path}.first")
        self.last.check(attempts, temperature, f"{path}.last")

    def at(self, done: float) -> Objective:
        """The objective between `first` (0) and `last` (1).

        >>> ends = {"first": LengthPenalty(limit=400), "last": LengthPenalty(limit=100)}
        >>> ByPerformance(**ends).at(0.5).limit
        250

        Raises:
            ConfigError: They differ in what is no number.
        """
        first, last = self.first, self.last
        moved = {
            name: _between(name, field.final_type, getattr(first, name), getattr(last, name), done)
            for name, field in chz.chz_fields(first).items()
        }
        return chz.replace(first, **moved)

    def done(self, solved_T: Sequence[float]) -> float:
        """How far it has gone from `first` (0) to `last` (1), after generations of these shares."""
        share = mean_of(solved_T[-self.window :]) if solved_T else 0.0
        return min(max((share - self.low) / (self.high - self.low), 0.0), 1.0)

    @override
    def metrics(self, outcomes: Outcomes) -> Metrics:
        return {"objective/done": self.done(outcomes.solved_T)}

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return self.at(self.done(outcomes.solved_T))(outcomes)


def _between(name: str, kind: object, first: object, last: object, done: float) -> object:
    """(1 − done) · first + done · last, of numbers and of tuples of them; whole where `kind` is."""
    if first == last:
        return first
    if isinstance(first, tuple) and isinstance(last, tuple):
        of_first, of_last = cast("tuple[object, ...]", first), cast("tuple[object, ...]", last)
        if len(of_first) == len(of_last):
            pairs = zip(of_first, of_last, strict=True)
            return tuple(_between(name, float, *pair, done) for pair in pairs)
    if {type(first), type(last)} <= {int, float}:
        value = (1 - done) * cast(float, first) + done * cast(float, last)
        return round(value) if kind in (int, int | None) else value
    raise ConfigError(
        f"first.{name} and last.{name} must be equal, or numbers, as many in both; found {first!r} "
        f"and {last!r}"
    )
