"""A sum of rewards whose weights change over the run: form first, then what is right, say.

    score = Σ_k w_k(t) · mean(r_k),   w_k(t) = start_k + (final_k − start_k) · min(t / T, 1)

with t the generation, T the generations over which the weights change, and r_k metrics that the
Envs report by name over a genome's attempts at a problem. A problem whose Env does not report one
leaves it out. The Env's own sum only says which rollouts were lost.
"""

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.rl.objectives import REWARD, Objective, Outcomes, check_weighted
from es_cookbook.rl.rollouts import mean_over_attempts


@chz.chz
class RewardSchedule(Objective):
    """The sum of rewards with weights that go from `start` to `final`."""

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
    def _valid(self) -> None:
        check_range(self, "over", at_least=1)
        check_weighted(self.rewards, start=self.start, final=self.final)

    @property
    @override
    def counted(self) -> tuple[str, ...]:
        return () if REWARD in self.rewards else self.rewards

    def weights(self, generation: int) -> tuple[float, ...]:
        """Of each reward in a generation.

        >>> RewardSchedule(start=(1.0, 0.0), final=(0.0, 1.0), over=4).weights(1)
        (0.75, 0.25)
        """
        done = min(generation / self.over, 1.0)
        pairs = zip(self.start, self.final, strict=True)
        return tuple(start + (final - start) * done for start, final in pairs)

    def __call__(self, outcomes: Outcomes) -> NDArray[np.float64]:
        """Weighted sums; NaN where all attempts were lost."""
        scores_P_G = np.zeros(outcomes.rewards_P_G_K.shape[:2])
        weights = self.weights(outcomes.generation)
        for name, weight in zip(self.rewards, weights, strict=True):
            values_P_G_K = outcomes.values(name, "objective.rewards")
            scores_P_G += weight * np.nan_to_num(mean_over_attempts(values_P_G_K))
        return np.where(outcomes.lost_P_G, np.nan, scores_P_G)
