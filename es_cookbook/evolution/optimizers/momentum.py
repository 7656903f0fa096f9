"""Momentum and Muon: the centre follows a moving average of the gradients.

Momentum (Polyak 1964, as an average):

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
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.es import ESOptimizer
from es_cookbook.evolution.optimizers.window import Gradient, WindowedES, average_weights, scaled
from es_cookbook.evolution.rules import MuonRule
from es_cookbook.evolution.spaces.base import SearchSpace


@chz.chz
class Momentum(WindowedES):
    """Evolution strategies with momentum."""

    momentum: float = chz.field(default=0.9, doc="m: share of the average that is kept")

    @chz.validate
    def _momentum(self) -> None:
        check_range(self, "momentum", at_least=0, below=1)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        # α v, with v = Σ_j m^age g_j / Σ_j m^age
        weights = average_weights(self.momentum, len(gradients))
        rate = self.learning_rate * factor
        return Step(scaled(gradients, [rate * weight for weight in weights]))


@chz.chz
class Muon(Momentum):
    """Evolution strategies with orthogonalised momentum: all singular values made equal.

    Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/): the averaged gradient G = U S
    Vᵀ of a weight matrix is replaced by about U Vᵀ, by five rounds of a Newton-Schulz iteration.
    Directions that few genomes spoke for count as much as those that many did.

        centre <- centre + α · RMS(v) · √max(rows, columns) · U Vᵀ

    with v the average of `momentum`. The factor gives the update the RMS that momentum's has, so α
    keeps its meaning. (Muon proper has no such factor: its gradients' lengths say nothing. Here a
    generation with little signal makes a small step.) Parameters that are no matrices gain plain
    momentum's update.

    Trap: the iteration is matrix products, which round as each library likes; here they are exact
    (`evolution.exact`), so the centre is the same on every machine. And with few terms the update
    has no more directions than terms: equal singular values then only mean equal weights for all
    seeds, which is what ranks nearly do.

    Cost: momentum's noise, and of each matrix one float32 and about five float64 copies while it
    moves; 15 products of its shorter side squared times its longer side.
    """

    iterations: int = chz.field(default=5, doc="rounds of the Newton-Schulz iteration")

    @chz.validate
    def _iterations(self) -> None:
        check_range(self, "iterations", at_least=1)

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> ESOptimizer:
        if space.mask is not None:
            raise ConfigError(
                "optimizer=muon moves every element of a matrix, also those that the mask of "
                "search_space.density leaves as they are; take density=1 or another optimizer"
            )
        return super().__call__(run_seed=run_seed, num_generations=num_generations, space=space)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        step = super().step(gradients, factor, kept)
        return Step(step.terms, rule=MuonRule(step.rms, self.iterations)) if step.terms else step
