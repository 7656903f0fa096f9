"""Hill climbing: the centre moves towards the best of its neighbours."""

from collections.abc import Sequence

import chz
import numpy as np

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.optimizers.base import Optimizer, OptimizerBuilder
from es_cookbook.evolution.spaces.base import SearchSpace


@chz.chz
class HillClimb(OptimizerBuilder):
    """The centre takes the perturbation of the best genome, times `step`."""

    sigma: float = chz.field(default=0.01, doc="standard deviation of the perturbations")
    step: float = chz.field(default=0.5, doc="share of the best genome's perturbation to take")

    @chz.validate
    def _above_zero(self) -> None:
        if self.sigma <= 0:
            raise ConfigError(f"sigma must be above 0, found {self.sigma}")

    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> Optimizer:
        return _HillClimb(self, run_seed)


class _HillClimb(Optimizer):
    def __init__(self, config: HillClimb, run_seed: int) -> None:
        self._config, self._run_seed = config, run_seed

    def ask(self, generation: int) -> list[Genome]:
        size, sigma = self._config.population_size, self._config.sigma
        seeds = (derive_seed(self._run_seed, "genome", generation, i) for i in range(size))
        return [Genome((Term(seed, sigma),)) for seed in seeds]

    def tell(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: Floats | None,
        fitness_G: Floats,
    ) -> Step:
        if np.isnan(fitness_G).all() or np.nanmax(fitness_G) == np.nanmin(fitness_G):
            return Step()
        (term,) = genomes_G[int(np.nanargmax(fitness_G))].terms
        return Step((Term(term.seed, self._config.step * term.coefficient),))

    def sigma(self, generation: int) -> float:
        return self._config.sigma
