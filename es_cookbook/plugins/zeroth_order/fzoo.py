"""FZOO: one-sided perturbations, whose step is divided by the spread of their losses.

Dang et al. 2025 (arXiv:2506.09034). N genomes at centre + σ · u, u of -1 and +1
(`search_space.noise=rademacher`), and the centre itself, with fitness f_i and f_0:

    centre <- centre + α/N · Σ_i (f_i - f_0) / s · u_i,    s² = 1/N Σ_i (f_i - mean f)²

In a flat region losses are close together, and the step is long; it is normalised SGD, with the
norm of the gradient estimated by s. The paper divides by ε (our σ) as well; the authors' code does
not, and their learning rates (5e-5 with ε = 1e-4) are for the code, so α is their η.

Genomes that were lost are left out, and N counts the others; without the centre their mean is the
baseline. Left out: the reuse of the last step's losses, which halves the forward passes.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.fitness import TIE, Floats
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.optimizers.es import ES, ESOptimizer
from es_cookbook.evolution.spaces.base import SearchSpace


@chz.chz
class FZOO(ES):
    """ES with steps divided by the spread of fitness, around the centre's (Dang et al. 2025)."""

    finds: ClassVar[Collection[str]] = ()  # Not of unit variance around the centre's fitness.
    not_carried: ClassVar[Collection[str]] = ("antithetic", "evaluate_centre")

    sigma: float = chz.field(default=1e-4, doc="standard deviation of the perturbations, ε")
    learning_rate: float = chz.field(
        default=5e-5, doc="α of the update α/N · Σ (fitness - the centre's) / spread · noise"
    )
    antithetic: bool = chz.field(default=False, doc="must be False: perturbations are one-sided")
    evaluate_centre: bool = chz.field(
        default=True, doc="must be True: the centre's fitness is the baseline"
    )

    @chz.validate
    def _one_sided(self) -> None:
        check_range(self, "population_size", at_least=2)  # One has no spread.
        if self.antithetic or not self.evaluate_centre:
            raise ConfigError(
                "fzoo compares one-sided perturbations with the centre: leave antithetic and "
                "evaluate_centre out, or take optimizer=es"
            )

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> ESOptimizer:
        return _FZOOOptimizer(self, run_seed, num_generations, space)


class _FZOOOptimizer(ESOptimizer):
    @override
    def gradient(
        self, genomes_G: Sequence[Genome], fitness_G: Floats, rate: float
    ) -> tuple[Term, ...]:
        perturbed_G = np.array([bool(genome.terms) for genome in genomes_G])
        there = fitness_G[perturbed_G & np.isfinite(fitness_G)]
        # Equal ones may differ by rounding, over which a step would be huge.
        if not len(there) or np.ptp(there) <= TIE * np.nanmax(np.abs(fitness_G)):
            return ()
        return super().gradient(genomes_G, fitness_G / there.std(), rate)
