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
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.window import AverageES, Gradient, average_weights, scaled


@chz.chz
class Momentum(AverageES):
    """Evolution strategies with momentum."""

    momentum: float = chz.field(default=0.9, doc="m: share of the average that is kept")

    @chz.validate
    def _momentum(self) -> None:
        check_range(self, "momentum", at_least=0, below=1)

    @override
    def step(self, gradients: Sequence[Gradient], rate: float) -> Step:
        """α times the average."""
        weights = average_weights(self.momentum, len(gradients))
        return Step(scaled(gradients, [rate * weight for weight in weights]))
