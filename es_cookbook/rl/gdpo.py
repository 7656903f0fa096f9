"""Several rewards, each normalised over the genomes of a problem before they are added.

With r_k the mean of reward k over a genome's attempts at a problem, and mean and standard deviation
over all genomes at that problem,

    score = Σ_k w_k · (r_k − mean(r_k)) / std(r_k)

as in GDPO (Liu et al. 2026, arXiv:2601.05242), there over the answers of a group. A plain sum is
governed by the reward that differs most: where half of the answers are right and the lengths differ
by a percent, length has no say, whatever its weight. Here the weights alone say what counts. GDPO's
second step, dividing by the standard deviation over the batch, is what `fitness=zscore` does.

The rewards are metrics that the Envs report by name, so any Env that reports its parts will do. A
reward that is the same for all genomes adds 0, as does one that a problem's Env does not report:
rows may have different rewards. The Env's own sum only says which rollouts were lost.

Pitfall: each problem and each reward gets the same spread, however little the genomes differ: a
single genome that solves a problem scores √(G − 1) there. Rewards that are mostly luck gain by it.
"""

from collections.abc import Sequence

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.rl.objectives import REWARD, Objective, Outcomes, check_weighted
from es_cookbook.rl.rewards.base import REWARD_NAMES
from es_cookbook.rl.rollouts import mean_over_attempts

TIE = 1e-12
"""Rewards closer together than this share of the largest count as equal."""


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
class Gdpo(Objective):
    """The weighted sum of rewards that are normalised one by one."""

    rewards: tuple[str, ...] = chz.field(
        default=("correct", "format"), doc="Env metrics that are rewards"
    )
    weights: tuple[float, ...] = chz.field(
        default=(), doc="one for each of the rewards; none: 1 each"
    )

    @chz.validate
    def _valid(self) -> None:
        check_weighted(self.rewards, **({"weights": self.weights} if self.weights else {}))

    @property
    @override
    def counted(self) -> Sequence[str]:
        return () if REWARD in self.rewards else self.rewards

    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Sums of z-scores; NaN where all attempts were lost."""
        scores_P_G = np.zeros(outcomes.rewards_P_G_K.shape[:2])
        weights = self.weights or (1.0,) * len(self.rewards)
        for name, weight in zip(self.rewards, weights, strict=True):
            if name in REWARD_NAMES and name not in outcomes.metrics:
                continue  # A shared reward, of rows that are not in this batch.
            values_P_G_K = outcomes.values(name, "objective.rewards")
            scores_P_G += weight * normalised(mean_over_attempts(values_P_G_K))
        return np.where(outcomes.lost_P_G, np.nan, scores_P_G)
