"""Muon: momentum whose update has all singular values made equal, matrix by matrix.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/): the averaged gradient G = U S Vᵀ of
a weight matrix is replaced by about U Vᵀ, by five rounds of a Newton-Schulz iteration. Directions
that few genomes spoke for count as much as those that many did.

    centre <- centre + α · RMS(v) · √max(rows, columns) · U Vᵀ

with v the average of `momentum`. The factor gives the update the RMS that momentum's has, so α
keeps its meaning. (Muon proper has no such factor: its gradients' lengths say nothing. Here a
generation with little signal makes a small step.) Parameters that are no matrices gain plain
momentum's update.

Trap: the iteration is matrix products, which round as each library likes; here they are exact
(`rule_arithmetic`), so the centre is the same on every machine. And with few terms the update has
no more directions than terms: equal singular values then only mean equal weights for all seeds,
which is what ranks nearly do.

Cost: momentum's noise, and of each matrix one float32 and about five float64 copies while it moves;
15 products of its shorter side squared times its longer side.
"""

from collections.abc import Sequence

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.momentum import Momentum
from es_cookbook.evolution.optimizers.window import AverageOptimizer, Gradient
from es_cookbook.evolution.rules import MuonRule
from es_cookbook.evolution.spaces.base import SearchSpace


@chz.chz
class Muon(Momentum):
    """Evolution strategies with orthogonalised momentum."""

    iterations: int = chz.field(default=5, doc="rounds of the Newton-Schulz iteration")

    @chz.validate
    def _iterations(self) -> None:
        check_range(self, "iterations", at_least=1)

    @override
    def __call__(
        self, *, run_seed: int, num_generations: int, space: SearchSpace
    ) -> AverageOptimizer:
        """Build it.

        Raises:
            ConfigError: The space has a mask: an orthogonalised update moves all of a matrix.
        """
        if space.mask is not None:
            raise ConfigError(
                "optimizer=muon moves every element of a matrix, also those that the mask of "
                "search_space.density leaves as they are; take density=1 or another optimizer"
            )
        return super().__call__(run_seed=run_seed, num_generations=num_generations, space=space)

    @override
    def step(self, gradients: Sequence[Gradient], rate: float) -> Step:
        """Momentum's step, with the rule."""
        step = super().step(gradients, rate)
        return Step(step.terms, rule=MuonRule(step.rms, self.iterations)) if step.terms else step
