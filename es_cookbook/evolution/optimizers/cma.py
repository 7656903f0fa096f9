"""CMA-ES with a full covariance matrix, by pycma (Hansen, arXiv:1604.00772).

The population is drawn from N(m, σ² C). The better half, weighted by rank, gives the new mean m;
the covariance C moves towards the steps that were selected (rank-μ) and the path of the mean
(rank-one), and away from the worst (active CMA); σ grows while the mean's steps point the same way
and falls while they cancel (cumulative step-size adaptation). So it finds the scale of every
direction, and with it the step size: there is no learning rate.

C has n² elements, and each generation needs its eigenvectors, n³ now and then: this is for the
singular values of an adapter (ESSA, Korotyshova et al. 2025, arXiv:2507.04453), not for weights.
Measured on one core, population 30, ask and tell: 0.02 s at n = 512, 0.06 s at 1,024, 0.8 s and
0.5 GB at 4,096. Beyond that, `sep_cma`.

Trap: the population. CMA-ES averages over half of it and adapts by ranks, so with 8 genomes and
noisy rewards it follows the noise; 24 to 96 are enough for hundreds of dimensions.

pycma's own stopping criteria, restarts and files are left out: the run decides. Its normals are
`es_cookbook.evolution.noise`'s, so nothing of NumPy's global randomness is read or moved. Of its
two step-size rules the cumulative one is used in all dimensions; its default changes at n = 300.
"""

import warnings
from collections.abc import Sequence

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.offsets import OffsetsBuilder, OffsetsOptimizer, need
from es_cookbook.evolution.spaces.base import SearchSpace

_MATRICES = 4
"""Of n² float64 that are alive at once: C, its eigenvectors, and what LAPACK works in."""


@chz.chz
class CMA(OffsetsBuilder):
    """CMA-ES with full covariance, for small search spaces (singular_values)."""

    max_dimension: int = chz.field(
        default=4096, doc="most parameters that the covariance matrix, of their square, is made for"
    )

    @chz.validate
    def _max_dimension(self) -> None:
        check_range(self, "max_dimension", at_least=1)

    @property
    @override
    def name(self) -> str:
        return "cma"

    def __call__(
        self, *, run_seed: int, num_generations: int, space: SearchSpace
    ) -> "CMAOptimizer":
        """Build it; refuses more parameters than max_dimension."""
        del num_generations
        dimension = self.dimension_of(space)
        if dimension > self.max_dimension:
            memory = _MATRICES * dimension**2 * np.dtype(np.float64).itemsize / 2**30
            raise ConfigError(
                f"optimizer=cma learns the covariance of all {dimension:,} parameters of this "
                f"search space, which needs about {memory:,.1f} GiB ({dimension:,}² x 8 bytes x "
                f"{_MATRICES}), and optimizer.max_dimension is {self.max_dimension:,}: take "
                "optimizer=sep_cma, or select fewer parameters"
            )
        need("cma", "cma")
        return CMAOptimizer(self, run_seed, dimension)


class CMAOptimizer(OffsetsOptimizer):
    """Samples and updates with the `cma` package."""

    def __init__(self, config: CMA, run_seed: int, dimension: int) -> None:
        self._seed, self._draws = 0, 0
        super().__init__(config, run_seed, dimension)

    @override
    def start(self, mean: Floats) -> None:
        # It warns of plots that cannot be made, and of stopping, which the run decides.
        with warnings.catch_warnings(action="ignore"):
            from cma import CMAEvolutionStrategy
            from cma.sigma_adaptation import CMAAdaptSigmaCSA

            options = {
                "popsize": self._config.population_size,
                "randn": self._normals,
                "seed": float("nan"),  # NumPy's global generator is not seeded
                "AdaptSigma": CMAAdaptSigmaCSA,
                "verbose": -9,
            }
            self._strategy = CMAEvolutionStrategy(mean.copy(), self._config.sigma, options)

    @override
    def sample(self, seed: int) -> Sequence[Floats]:
        self._seed, self._draws = seed, 0
        with warnings.catch_warnings(action="ignore"):
            return self._strategy.ask()

    @override
    def update(self, points_G: Sequence[Floats], ranks_G: Sequence[int]) -> None:
        with warnings.catch_warnings(action="ignore"):
            self._strategy.tell(points_G, [float(rank) for rank in ranks_G])

    @override
    def mean(self) -> Floats:
        return np.array(self._strategy.mean)

    def _normals(self, *shape: int) -> Floats:
        """Standard-normal numbers, others at each call of a generation."""
        self._draws += 1
        return noise(self._seed, f"cma.{self._draws}", shape).astype(np.float64)
