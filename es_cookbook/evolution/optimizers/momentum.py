"""Momentum: the centre follows a moving average of the gradients (Polyak 1964, as an average).

    v = Σ_j m^age g_j / Σ_j m^age,   centre <- centre + α v

Because the weights add up to 1, a steady gradient gives plain ES's steady step, so α keeps its
meaning whatever m is. What is gained is a step whose noise is that of about (1 + m) / (1 - m)
generations instead of one; over the whole run a seed moves the centre as far as in plain ES, only
spread over the window. Trap: the sum in place of the average, see `window`.

Cost: the noise of `window` generations a step in place of one; no memory.
"""

from collections.abc import Sequence

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.window import (
    WindowedES,
    WindowOptimizer,
    average_weights,
    scaled,
)
from es_cookbook.evolution.spaces.base import SearchSpace


@chz.chz
class Momentum(WindowedES):
    """Evolution strategies with momentum."""

    momentum: float = chz.field(default=0.9, doc="m: share of the average that is kept")

    @chz.validate
    def _momentum(self) -> None:
        check_range(self, "momentum", at_least=0, below=1)

    @override
    def __call__(
        self, *, run_seed: int, num_generations: int, space: SearchSpace
    ) -> "MomentumOptimizer":
        del space
        return MomentumOptimizer(self, run_seed, num_generations)


class MomentumOptimizer(WindowOptimizer):
    """Moves the centre by the average gradient of the window."""

    def __init__(self, config: Momentum, run_seed: int, num_generations: int) -> None:
        super().__init__(config, run_seed, num_generations)
        self._momentum = config.momentum

    def move(
        self, generation: int, genomes_G: Sequence[Genome], fitness_G: NDArray[np.float64]
    ) -> Step:
        """α times the average."""
        gradients = self.remember(genomes_G, fitness_G)
        rate = self.learning_rate(generation)
        weights = [rate * w for w in average_weights(self._momentum, len(gradients))]
        return Step(scaled(gradients, weights))
