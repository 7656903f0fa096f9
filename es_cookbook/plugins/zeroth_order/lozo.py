"""LOZO: low-rank perturbations of which one factor is kept for a number of generations.

Chen et al. 2024 (arXiv:2410.07698). A genome's weight is W + c · U Vᵀ / √r, U (out x r) drawn for
each seed and V (in x r) once for `interval` generations. For so long the steps stay in the weights
U Vᵀ of one V, a subspace of r directions of each input, in which they add up; it is ZO-SGD in a
random subspace that is drawn anew.

A term is (seed, coefficient) as everywhere. The seeds of an interval have the same quotient by
`SEEDS_OF_PARTITION`, and V is noise of that quotient:

    U = ε(seed, name + ".A"),    V = ε(⌊seed / 2¹⁶⌋, name + ".lazy")

so a history says by its seeds which V each step had, and is replayed without the optimizer.

Left out: LOZO-M, a momentum of U; weights that are not matrices, which the authors perturb by dense
noise.
"""

from collections.abc import Sequence
from typing import ClassVar

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.noise import (
    SEEDS_OF_PARTITION,
    noise_of_seeds,
    partition_of,
    partition_seed,
)
from es_cookbook.evolution.optimizers.es import ES, ESOptimizer
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace, SearchSpaceBuilder
from es_cookbook.evolution.spaces.factors import ReadAdapter
from es_cookbook.evolution.spaces.low_rank import LowRank, LowRankSpace


@chz.chz
class LazyLowRank(LowRank):
    """Low-rank noise whose input factor is kept for several generations (LOZO); for lozo."""

    @chz.validate
    def _whole(self) -> None:
        if self.partitions > 1:
            raise ConfigError(
                "search_space.partitions must be 1 with lazy_low_rank, found "
                f"{self.partitions}: seeds say already which factor they have"
            )

    @override
    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> LowRankSpace:
        plain = super().__call__(parameters, read_adapter)
        return LazyLowRankSpace(plain.shapes, plain.noise, plain.shares, rank=plain.rank)


class LazyLowRankSpace(LowRankSpace):
    """Linear weights, perturbed by U Vᵀ / √rank with the V of a seed's interval."""

    makes_own_factors: ClassVar[bool] = True

    @override
    def term_factors(
        self, name: str, seeds_S: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows, columns = self.shapes[name]
        u_S = noise_of_seeds(seeds_S, f"{name}.A", (rows, self.rank), self.noise)
        intervals, place_S = np.unique(list(map(partition_of, seeds_S)), return_inverse=True)
        shape = (columns, self.rank)
        v = noise_of_seeds(intervals.tolist(), f"{name}.lazy", shape, self.noise)
        return u_S, v[place_S]


@chz.chz
class LOZO(ES):
    """ES in a random subspace that is drawn anew every few generations (Chen et al. 2024)."""

    interval: int = chz.field(
        default=50, doc="generations in which the input factor of the noise stays the same"
    )

    @chz.validate
    def _interval(self) -> None:
        check_range(self, "interval", at_least=1)
        seeds = self.population_size * self.interval
        if seeds > SEEDS_OF_PARTITION:
            raise ConfigError(
                f"interval · population_size must be at most {SEEDS_OF_PARTITION:,}, found "
                f"{seeds:,}"
            )

    @override
    def check_run(self, search_space: SearchSpaceBuilder, num_generations: int) -> None:
        super().check_run(search_space, num_generations)
        if not isinstance(search_space, LazyLowRank):
            raise ConfigError(
                "optimizer=lozo keeps a factor of low-rank noise: add search_space=lazy_low_rank, "
                f"found {type(search_space).__name__}"
            )

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> ESOptimizer:
        return _LOZOOptimizer(self, run_seed, num_generations, space)


class _LOZOOptimizer(ESOptimizer):
    """Draws seeds of the interval's own quotient."""

    def __init__(
        self, config: LOZO, run_seed: int, num_generations: int, space: SearchSpace
    ) -> None:
        super().__init__(config, run_seed, num_generations, space)
        self._interval = config.interval

    @override
    def seed(self, generation: int, i: int) -> int:
        interval, within = divmod(generation, self._interval)
        of_interval = derive_seed(self.run_seed, "interval", interval)
        return partition_seed(of_interval, within * self.num_seeds + i)
