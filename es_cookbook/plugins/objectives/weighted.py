"""Weighted sums of rewards that Envs report: of normalised ones, and with weights that change."""

from collections.abc import Callable, Sequence

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.objectives import REWARD, Objective, Outcomes
from es_cookbook.rl.rewards.base import REWARD_NAMES, check_weights
from es_cookbook.rl.rollouts import mean_over_attempts

TIE = 1e-12
"""Rewards closer together than this share of the largest count as equal."""


@chz.chz
class _WeightedMetrics(Objective):
    """A weighted sum of rewards, which are metrics that the Envs report by name.

    So any Env that reports its parts will do. A reward that a problem's Env does not report adds 0:
    rows may have different rewards. The Env's own sum only says which rollouts were lost.
    """

    rewards: tuple[str, ...] = chz.field(default=("correct", "format"), doc="Env metrics to add")

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
        """Return Σ weight · scored(a genome's mean over attempts); NaN where all were lost."""
        scores_P_G = np.zeros(outcomes.rewards_P_G_K.shape[:2])
        for name, weight in zip(self.rewards, weights, strict=True):
            if name in REWARD_NAMES and name not in outcomes.metrics:
                continue  # A shared reward, of rows that are not in this batch.
            means_P_G = mean_over_attempts(outcomes.values(name, "objective.rewards"))
            scores_P_G += weight * scored(means_P_G)
        all_lost_P_G = np.isnan(outcomes.rewards_P_G_K).all(axis=2)
        return np.where(all_lost_P_G, np.nan, scores_P_G)


def _refuse_zeros(weights: Sequence[float]) -> None:
    if not any(weights):
        raise ConfigError("weights must not all be 0: genomes would never differ")


@chz.chz
class Gdpo(_WeightedMetrics):
    """Several rewards, each normalised over the genomes of a problem before they are added.

        score = Σ_k w_k · (r_k − mean(r_k)) / std(r_k)

    with r_k the mean of reward k over a genome's attempts at a problem, and mean and standard
    deviation over all genomes at it, as in GDPO (Liu et al. 2026, arXiv:2601.05242), there over the
    answers of a group. A plain sum is governed by the reward that differs most: where half of the
    answers are right and the lengths differ by a percent, length has no influence, for any weight.
    Here the weights alone say what counts. GDPO's second step, dividing by the standard deviation
    over the batch, is what `fitness=zscore` does.

    Pitfall: each problem and each reward gets the same spread, however little the genomes differ: a
    single genome that solves a problem scores √(G − 1) there. Rewards that are mostly luck gain by
    it.
    """

    weights: tuple[float, ...] = chz.field(default=(), doc="one for each reward; none: 1 each")

    @chz.validate
    def _weights(self) -> None:
        if self.weights:
            check_weights(self.rewards, weights=self.weights)
            _refuse_zeros(self.weights)

    @property
    @override
    def compares_genomes(self) -> bool:
        return True

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return self.summed(outcomes, self.weights or (1.0,) * len(self.rewards), normalised)


def normalised(values_P_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return z-scores over the genomes at each problem; 0 where all are equal, and for NaN.

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
    """A sum of rewards whose weights change over the run, for example first form, then correctness.

        score = Σ_k w_k(t) · mean(r_k),   w_k(t) = start_k + (final_k − start_k) · min(t / over, 1)

    with t the generation and r_k the rewards of a genome's attempts at a problem.
    """

    rewards: tuple[str, ...] = chz.field(default=("format", "correct"), doc="Env metrics to add")
    start: tuple[float, ...] = chz.field(default=(1.0, 0.0), doc="weights in the first generation")
    final: tuple[float, ...] = chz.field(
        default=(0.1, 0.9), doc="weight of each from generation `over` on"
    )
    over: int = chz.field(default=20, doc="generations over which the weights change")

    @chz.validate
    def _weights(self) -> None:
        check_range(self, "over", at_least=1)
        check_weights(self.rewards, start=self.start, final=self.final)
        _refuse_zeros((*self.start, *self.final))

    def weights(self, generation: int) -> tuple[float, ...]:
        """Return the weight of each reward in a generation.

        >>> RewardSchedule(start=(1.0, 0.0), final=(0.0, 1.0), over=4).weights(1)
        (0.75, 0.25)
        """
        done = min(generation / self.over, 1.0)
        pairs = zip(self.start, self.final, strict=True)
        return tuple(start + (final - start) * done for start, final in pairs)

    @override
    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        return self.summed(outcomes, self.weights(outcomes.generation), np.nan_to_num)
