"""Evolution strategies in their plainest form: fitness-weighted sum of the noise that was tried.

Salimans et al. 2017 (arXiv:1703.03864) as ES at Scale (arXiv:2509.24372) uses it on language
models: N genomes at centre ± σ·ε(seed), and the centre gains α/N · Σ_g fitness_g · sign_g ·
ε(seed_g). No division by σ: as there, it is part of α (the reference setting is σ = 1e-3, α = σ/2,
N = 30, z-scored fitness).

Twins share a seed, so their two terms are one: α/N · (fitness₊ - fitness₋). A pair that ties
cancels exactly and costs nothing to apply; a generation in which all pairs tie gives an empty step.

Lost genomes (NaN fitness) are left out and N counts those that remain. A twin whose partner is lost
is left out too: the difference between twins is what cancels everything that the two share, and one
side alone would bring it back in as noise, biased if failing depends on the direction.

Left out: momentum, Adam and weight decay, which are optimizers of their own; adapting σ.
"""

import math
from collections.abc import Sequence

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.configs import Names
from es_cookbook.errors import ConfigError
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.optimizers.base import Optimizer, OptimizerBuilder
from es_cookbook.evolution.schedules import SCHEDULE_NAMES, Constant, Schedule, warmup
from es_cookbook.seeds import derive_seed


@chz.chz
class ES(OptimizerBuilder):
    """Evolution strategies (Salimans et al. 2017)."""

    sigma: float = chz.field(default=1e-3, doc="standard deviation of the perturbations")
    learning_rate: float = chz.field(
        default=5e-4, doc="α of the update α/N · Σ fitness · noise; σ is not divided out"
    )
    antithetic: bool = chz.field(
        default=True, doc="genomes in mirrored pairs: centre + σ·ε and centre - σ·ε"
    )
    sigma_schedule: Schedule = chz.field(
        default=Constant(),
        meta_factory=Names(SCHEDULE_NAMES, default="none"),
        doc="factor on sigma over the run",
    )
    learning_rate_schedule: Schedule = chz.field(
        default=Constant(),
        meta_factory=Names(SCHEDULE_NAMES, default="none"),
        doc="factor on learning_rate over the run",
    )
    warmup_generations: int = chz.field(
        default=0, doc="generations in which learning_rate rises from 1/n of itself to itself"
    )

    @chz.validate
    def _fields(self) -> None:
        if self.population_size < 1:
            raise ConfigError(f"population_size must be at least 1, found {self.population_size}")
        if self.antithetic and self.population_size % 2:
            raise ConfigError(
                "population_size must be even when antithetic is on, because genomes come in "
                f"mirrored pairs; found {self.population_size}"
            )
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise ConfigError(f"sigma must be above 0, found {self.sigma}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise ConfigError(f"learning_rate must be 0 or more, found {self.learning_rate}")
        if self.warmup_generations < 0:
            raise ConfigError(
                f"warmup_generations must be 0 or more, found {self.warmup_generations}"
            )

    def __call__(self, *, run_seed: int, num_generations: int) -> "ESOptimizer":
        """Build it; refuses a sigma_schedule that reaches 0 within the run."""
        optimizer = ESOptimizer(self, run_seed=run_seed, num_generations=num_generations)
        for generation in range(num_generations):
            if optimizer.sigma(generation) == 0:
                raise ConfigError(
                    f"sigma_schedule reaches 0 at generation {generation} of {num_generations}; "
                    "sigma must stay above 0"
                )
        return optimizer


class ESOptimizer(Optimizer):
    """Stateless: what it asks depends on the run seed and the generation alone."""

    def __init__(self, config: ES, *, run_seed: int, num_generations: int) -> None:
        self._config = config
        self._run_seed = run_seed
        self._num_generations = num_generations

    def sigma(self, generation: int) -> float:
        """The base sigma times its schedule."""
        config = self._config
        return config.sigma * config.sigma_schedule(generation, self._num_generations)

    def learning_rate(self, generation: int) -> float:
        """The base learning rate times its schedule times the warm-up."""
        config = self._config
        factor = config.learning_rate_schedule(generation, self._num_generations)
        return config.learning_rate * factor * warmup(generation, config.warmup_generations)

    def ask(self, generation: int) -> list[Genome]:
        """Fresh seeds; with antithetic on, genomes 2i and 2i + 1 are +σ and -σ of one seed."""
        sigma = self.sigma(generation)
        signs = (1, -1) if self._config.antithetic else (1,)
        return [
            Genome(
                terms=(Term(derive_seed(self._run_seed, "genome", generation, i), sign * sigma),)
            )
            for i in range(self._config.population_size // len(signs))
            for sign in signs
        ]

    def tell(
        self, generation: int, genomes_G: Sequence[Genome], fitness_G: NDArray[np.float64]
    ) -> Step:
        """One term a seed, in the order of the genomes; seeds whose twins tie have none."""
        if np.isinf(fitness_G).any():
            raise ValueError(f"fitness must be finite or NaN, found {fitness_G.tolist()}")
        signed_fitness: dict[int, list[float]] = {}
        for genome, fitness in zip(genomes_G, fitness_G.tolist(), strict=True):
            (term,) = genome.terms
            signed_fitness.setdefault(term.seed, []).append(
                math.copysign(1, term.coefficient) * fitness
            )
        # A NaN spreads over the sum of its pair: that is how a pair with a lost twin is left out.
        totals = {seed: sum(values) for seed, values in signed_fitness.items()}
        kept = {seed: total for seed, total in totals.items() if not math.isnan(total)}
        if not kept:
            return Step()
        num_kept = sum(len(signed_fitness[seed]) for seed in kept)
        scale = self.learning_rate(generation) / num_kept
        return Step(
            terms=tuple(Term(seed, scale * total) for seed, total in kept.items() if scale * total)
        )
