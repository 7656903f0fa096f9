"""CMA-ES with a full or a diagonal covariance: optimizers that name points by coordinates.

CMA-ES learns the scale of directions, so its genomes are not multiples of fixed noise: each carries
its coordinates (`Genome.offsets`, added to the base), and a step puts the centre on the new mean of
the distribution (`OffsetsRule`). The history holds the mean of every generation, 5.3 bytes per
parameter (float32 in base64), and engines receive 4 bytes per parameter and genome: this is for
spaces of 10² to 10⁶ parameters.

CMA-ES uses only ranks, best first, ties in the order of the population. A lost genome (NaN) ranks
last, because the libraries need the whole population ranked. If no two genomes differ, or all are
lost, the distribution stays as it is, and the step is empty.

The state is rebuilt by asking and telling the recorded generations again. The libraries compute
with NumPy and LAPACK, so the bits are the same where those are the same. Elsewhere the recorded
steps still give the same centre, but continuing may be refused, with the advice to fork.

The distribution begins around the base, or in a fork around the last mean of the other run, with
`sigma` and no learned covariance.
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, not_installed
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import Genome, Offsets, OffsetsRule, Step
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.base import Optimizer, OptimizerBuilder
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder

_SMALLEST_POPULATION = 4


@chz.chz
class _OffsetsBuilder(OptimizerBuilder):
    """Options of both.

    Attributes:
        name: what users type.
        package: the library.
        least: minimum number of parameters.
        most: maximum number of parameters.
        otherwise: the other optimizer.
    """

    # Sigma is in the units of a small space, and adapts.
    not_carried: ClassVar[Collection[str]] = ("sigma",)

    name = package = otherwise = ""
    least, most = 1, 2**31
    sigma: float = chz.field(
        default=0.05,
        doc="standard deviation of the first generation, in the parameters' own units; it adapts",
    )

    @chz.validate
    def _shared_fields(self) -> None:
        if self.population_size < _SMALLEST_POPULATION:
            raise ConfigError(
                f"population_size must be at least {_SMALLEST_POPULATION} for CMA-ES to recombine "
                f"the better half of it, found {self.population_size}; 24 to 96 are usual"
            )
        check_range(self, "sigma", above=0)

    @override
    def check_run(self, search_space: SearchSpaceBuilder, num_generations: int) -> None:
        if not search_space.hosts_offsets:
            raise ConfigError(
                f"optimizer={self.name} gives every genome its own coordinates, which genomes of "
                f"{type(search_space).__name__} cannot have (low-rank ones share the centre's "
                "weights, codes are whole numbers): add search_space=singular_values "
                "search_space.start=... (the directory of a PEFT adapter), search_space=adapter or "
                "search_space=full_rank"
            )
        if search_space.partitions > 1 or set(search_space.sigma_factors) - {1.0}:
            raise ConfigError(
                f"optimizer={self.name} perturbs all parameters at once by the covariance that it "
                "learns, so search_space's sigma_factors and partitions have no meaning with "
                "it: leave them out"
            )

    @override
    def check(self, model_name: str, search_space: SearchSpaceBuilder) -> None:
        self._require_package()
        from es_cookbook.runs.centre.replay import space_of  # torch, which a Config does without

        self._dimension(space_of(search_space, model_name))

    def _require_package(self) -> None:
        if find_spec(self.package) is None:
            what, library = f"optimizer={self.name}", f"the package {self.package}"
            raise not_installed(what, library, "es-cookbook[cma]")

    def _dimension(self, space: SearchSpace) -> int:
        """Return the number of parameters, unless they are too few or too many."""
        dimension = sum(math.prod(shape) for shape in space.shapes.values())
        if not self.least <= dimension <= self.most:
            raise ConfigError(
                f"optimizer={self.name} takes {self.least:,} to {self.most:,} parameters, and this "
                f"search space has {dimension:,}: select others, or use optimizer={self.otherwise}"
            )
        return dimension

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> Optimizer:
        self._require_package()
        kind = {"cma": _CMAOptimizer, "sep_cma": _SepCMAOptimizer}[self.name]
        return kind(self, run_seed, self._dimension(space))


class _OffsetsOptimizer(Optimizer):
    """Asks and tells a distribution: `_strategy`, an object of the library, which has its mean."""

    _strategy: Any

    def __init__(self, config: _OffsetsBuilder, run_seed: int, dimension: int) -> None:
        self._config = config
        self._run_seed = run_seed
        self._sigma = config.sigma
        self._asked: int | None = None
        self._points_G: Sequence[Floats] = ()
        self._mean = np.zeros(dimension)
        self.start(self._mean)

    @abstractmethod
    def start(self, mean: Floats) -> None:
        """Begin with an isotropic distribution around this mean, which must not be changed."""

    @abstractmethod
    def sample(self, seed: int) -> Sequence[Floats]:
        """Draw a population from the present distribution, a pure function of it and the seed."""

    @abstractmethod
    def update(self, points_G: Sequence[Floats], ranks_G: Sequence[int]) -> None:
        """Move the distribution towards the points of low rank."""

    @override
    def begin_after(self, steps: Sequence[Step]) -> None:
        """Begin at the last step that moves, which must give the centre by coordinates."""
        moving = [step for step in steps if step.terms or step.decay or step.rule]
        if not moving:
            return
        rule = moving[-1].rule
        if not isinstance(rule, OffsetsRule):
            raise ConfigError(
                "optimizers that name points by coordinates (cma, sep_cma) can go on from steps of "
                "their own kind only: fork a run of theirs, or begin a new one"
            )
        self._mean = rule.offsets.array.astype(np.float64)
        self.start(self._mean)

    @override
    def ask(self, generation: int) -> list[Genome]:
        """Return a population around the mean."""
        if self._asked != generation:
            self._points_G = self.sample(derive_seed(self._run_seed, "population", generation))
            self._asked = generation
            squares_G = [float(np.mean((point - self._mean) ** 2)) for point in self._points_G]
            self._sigma = math.sqrt(math.fsum(squares_G) / len(squares_G))
        return [Genome(offsets=Offsets.of(point)) for point in self._points_G]

    @override
    def tell(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: Floats | None,
        fitness_G: Floats,
    ) -> Step:
        """Return the step to the new mean; empty if the fitness ranks no genome."""
        self.ask(generation)
        present = fitness_G[~np.isnan(fitness_G)]
        if not len(present) or present.min() == present.max():
            return Step()
        # A stable sort: which of two equals comes first must not depend on the machine.
        best_first = np.argsort(np.where(np.isnan(fitness_G), np.inf, -fitness_G), kind="stable")
        self.update(self._points_G, np.argsort(best_first).tolist())
        before, self._mean = self._mean, np.array(self._strategy.mean)
        moved = math.sqrt(float(np.mean((self._mean - before) ** 2)))
        return Step(rule=OffsetsRule(Offsets.of(self._mean), moved))

    @override
    def sigma(self, generation: int) -> float:
        """Return the RMS distance of the population from the mean, per parameter."""
        return self._sigma


@chz.chz
class CMA(_OffsetsBuilder):
    """CMA-ES with full covariance, for small search spaces (singular_values).

    By pycma (Hansen, arXiv:1604.00772). The population is drawn from N(m, σ² C). The better half,
    weighted by rank, gives the new mean m; the covariance C moves towards the steps that were
    selected (rank-μ) and the path of the mean (rank-one), and away from the worst (active CMA); σ
    grows while the mean's steps point the same way and falls while they cancel (cumulative
    step-size adaptation). So it finds the scale of every direction, and with it the step size:
    there is no learning rate.

    C has n² elements, and each generation needs its eigenvectors, n³ now and then: this is for the
    singular values of an adapter (ESSA, Korotyshova et al. 2025, arXiv:2507.04453), not for
    weights. Measured on one core, population 30, ask and tell: 0.02 s at n = 512, 0.06 s at 1,024,
    0.8 s and 0.5 GB at 4,096. Beyond that, `sep_cma`.

    Trap: the population. CMA-ES averages over half of it and adapts by ranks, so with 8 genomes and
    noisy rewards it follows the noise; 24 to 96 are enough for hundreds of dimensions.

    pycma's own stopping criteria, restarts and files are left out: the run decides. Its normals are
    `es_cookbook.evolution.noise`'s, so nothing of NumPy's global randomness is read or moved. Of
    its two step-size rules the cumulative one is used in all dimensions; its default changes at n =
    300.
    """

    name = package = "cma"
    most = 4096
    otherwise = "sep_cma"


class _CMAOptimizer(_OffsetsOptimizer):
    """Samples and updates with the `cma` package."""

    _seed = _draws = 0

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
            make: Any = CMAEvolutionStrategy  # without types, which pyright would infer for seconds
            self._strategy = make(mean.copy(), self._config.sigma, options)

    @override
    def sample(self, seed: int) -> Sequence[Floats]:
        self._seed, self._draws = seed, 0
        with warnings.catch_warnings(action="ignore"):
            return self._strategy.ask()

    @override
    def update(self, points_G: Sequence[Floats], ranks_G: Sequence[int]) -> None:
        with warnings.catch_warnings(action="ignore"):
            self._strategy.tell(points_G, [float(rank) for rank in ranks_G])

    def _normals(self, *shape: int) -> Floats:
        """Return standard-normal numbers, different ones at each call of a generation."""
        self._draws += 1
        return noise(self._seed, f"cma.{self._draws}", shape).astype(np.float64)


@chz.chz
class SepCMA(_OffsetsBuilder):
    """Separable CMA-ES, one scale a parameter, for adapters.

    By cmaes (Ros and Hansen 2008). As `cma`, but C is a diagonal: the scale of every parameter is
    learned, how they depend on each other is not. In turn the diagonal may be learned about n/3
    times as fast, and everything costs a few passes over n numbers: LoRA adapters of 10⁵ to 10⁶
    parameters work (`search_space=adapter`).

    Measured on one core, population 30, ask and tell: 0.2 s at n = 10⁵, 3 s and 1.5 GB at 10⁶; the
    population is held in float64 several times over while it is ranked, up to 50 bytes a parameter
    and genome. The history takes 5.3 bytes a parameter and generation.

    Trap: σ. The first population is spread by `sigma` over *all* parameters, and a step in 10⁶
    dimensions is √10⁶ times as long: what is right for plain ES on the same space is right here.
    """

    name, package = "sep_cma", "cmaes"
    least = 2
    otherwise = "cma"
    sigma: float = chz.field(
        default=0.01,
        doc="standard deviation of the first generation, in the parameters' own units; it adapts",
    )


class _SepCMAOptimizer(_OffsetsOptimizer):
    """Samples and updates with the `cmaes` package."""

    @override
    def start(self, mean: Floats) -> None:
        import cmaes

        size = self._config.population_size
        # A copy, because it is written in place.
        self._strategy = cmaes.SepCMA(mean.copy(), self._config.sigma, seed=0, population_size=size)

    @override
    def sample(self, seed: int) -> Sequence[Floats]:
        self._strategy.reseed_rng(seed % 2**32)
        return [self._strategy.ask() for _ in range(self._config.population_size)]

    @override
    def update(self, points_G: Sequence[Floats], ranks_G: Sequence[int]) -> None:
        self._strategy.tell(list(zip(points_G, map(float, ranks_G), strict=True)))
