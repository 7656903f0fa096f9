"""Evolution strategies (ES): the fitness-weighted sum of the noise that was tried.

Salimans et al. 2017 (arXiv:1703.03864) as ES at Scale (arXiv:2509.24372) uses it on language
models: N genomes at centre ± σ·ε(seed), and the centre gains α/N · Σ_g fitness_g · sign_g ·
ε(seed_g). No division by σ: as there, it is part of α (the reference setting is σ = 1e-3, α = σ/2,
N = 30, z-scored fitness).

Twins share a seed, so their two terms are one: α/N · (fitness₊ - fitness₋). A pair that ties
cancels exactly and costs nothing to apply; a generation in which all pairs tie gives an empty step.

Lost genomes (NaN fitness) are left out and N counts those that remain. A twin whose partner is lost
is left out too: the difference between twins is what cancels everything that the two share, and one
side alone would bring it back in as noise, biased if failing depends on the direction.

Three options. `weight_decay` moves the centre back towards the base model, not towards zero, by
that share of the way a generation (times the learning rate's schedule). `evaluate_centre` makes the
centre itself attempt the problems; without mirrored pairs its fitness is the baseline.
`adaptive_sigma` adapts σ by it:

    σ <- σ · exp(rate · tanh(target - (fitness of the centre - mean) / std))

over the genomes' mean and standard deviation: where the centre beats its neighbours by more than
the target, σ is too large for the landscape and falls.

`sharpness` ρ above 0 is sharpness-aware ES (ESSAM, arXiv:2602.01003; SAM, Foret et al. 2021,
arXiv:2010.01412): the step is found where fitness is lower nearby, so that the centre comes to flat
places. A step takes two generations, twice the rollouts:

    generation 2i:      centre <- centre - d,       d = ρ/N · Σ fitness · sign · ε
    generation 2i + 1:  centre <- centre + d + α g  with the g of the genomes around centre - d

Both are sums of terms, so a history needs nothing else. In ESSAM both populations attempt the same
problems; here each generation has its own. An odd last generation makes a step of plain ES. Trap:
between the two the centre is meant to be worse, so evaluate after an even number of generations.

A learning rate that was found is for fitness of unit variance, which z-scores have. Ranks have a
standard deviation of 0.29, less where many tie, and that of rewards depends on the task. With
`divides_fitness` the optimizer uses fitness in units of its RMS over the run so far:

    f / r_t,   r_t² = mean over generations up to t, those without a signal left out, of mean f²

Generations keep their relative weight: one whose fitness says little makes a smaller step. r
follows from the recorded fitness, so a resumed run makes the same steps.

Optimizers that use the fitness-weighted sum otherwise (momentum, Adam, ClipUp, Muon, QES) override
`move`, most of them in `optimizers/window.py`.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, cast

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.checks import check_range, in_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.noise import SEEDS_OF_PARTITION, partition_seed
from es_cookbook.evolution.optimizers.base import (
    AUTO,
    Auto,
    Optimizer,
    OptimizerBuilder,
    number,
    refuse_zero_sigma,
)
from es_cookbook.evolution.schedules import Schedule, schedule_field, warmup
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder


@chz.chz
class AdaptiveSigma:
    """Adaptation of σ to the centre's fitness relative to its neighbours'."""

    rate: float = chz.field(default=0.1, doc="most that ln σ changes in a generation")
    target: float = chz.field(
        default=0.5, doc="standard deviations by which the centre should beat the mean genome"
    )
    smallest: float = chz.field(default=0.1, doc="least factor on sigma")
    largest: float = chz.field(default=10.0, doc="greatest factor on sigma")

    _rate = in_range("rate", above=0, prefix="adaptive_sigma.")
    _target = in_range("target", prefix="adaptive_sigma.")
    _smallest = in_range("smallest", above=0, at_most=1, prefix="adaptive_sigma.")
    _largest = in_range("largest", at_least=1, prefix="adaptive_sigma.")

    def __call__(self, factor: float, genomes_G: Sequence[Genome], fitness_G: list[float]) -> float:
        """Return the next factor on σ; the same if the centre is lost or all genomes did alike."""
        pairs = list(zip(genomes_G, fitness_G, strict=True))
        centre = [fitness for genome, fitness in pairs if not genome.terms]
        others = [fitness for genome, fitness in pairs if genome.terms and math.isfinite(fitness)]
        spread = float(np.std(others)) if others else 0.0
        if not centre or not math.isfinite(centre[0]) or not spread:
            return factor
        lead = (centre[0] - math.fsum(others) / len(others)) / spread
        # σ <- σ · exp(rate · tanh(target - (fitness of the centre - mean) / std))
        factor *= math.exp(self.rate * math.tanh(self.target - lead))
        return min(max(factor, self.smallest), self.largest)


@chz.chz
class ES(OptimizerBuilder):
    """Evolution strategies: the step is α/N · Σ fitness · ε (Salimans et al. 2017)."""

    finds: ClassVar[Collection[str]] = ("sigma", "learning_rate")
    adds_terms: ClassVar[bool] = True
    """Whether steps are sums of terms, without a rule."""

    sigma: Auto = chz.field(
        default=AUTO,
        doc="standard deviation of the perturbations; auto finds it before the first generation",
    )
    learning_rate: Auto = chz.field(
        default=AUTO,
        doc="α of the update α/N · Σ fitness · noise; σ is not divided out; auto: from sigma",
    )
    antithetic: bool = chz.field(default=True, doc="genomes in mirrored pairs, centre ± σ·ε")
    sigma_schedule: Schedule = schedule_field("factor on sigma over the run")
    learning_rate_schedule: Schedule = schedule_field("factor on learning_rate over the run")
    warmup_generations: int = chz.field(
        default=0, doc="generations in which learning_rate rises from 1/n of itself to itself"
    )
    weight_decay: float = chz.field(default=0.0, doc="share of the way back to the base per step")
    sharpness: float = chz.field(
        default=0.0,
        doc="ρ of the move ρ/N · Σ fitness · noise to where fitness is lower, which every other "
        "generation makes and the next one takes back (ESSAM); 0: not made",
    )
    evaluate_centre: bool = chz.field(default=False, doc="the centre attempts the problems too")
    adaptive_sigma: AdaptiveSigma | None = chz.field(
        default=None, doc="steers sigma by the centre's fitness; needs evaluate_centre"
    )

    @chz.validate
    def _fields(self) -> None:
        # One genome alone is its own baseline, and never moves the centre.
        check_range(self, "population_size", at_least=2 - self.evaluate_centre)
        if self.antithetic and self.population_size % 2:
            raise ConfigError(
                "population_size must be even with antithetic=True, because genomes come in "
                f"mirrored pairs; found {self.population_size}"
            )
        check_range(self, "sigma", above=0)
        check_range(self, "learning_rate", "warmup_generations", "sharpness", at_least=0)
        check_range(self, "weight_decay", at_least=0, below=1)
        if self.sharpness and not self.adds_terms:
            raise ConfigError(
                "sharpness is for optimizers whose steps are sums of noise (es, momentum, "
                f"clip_up), and not for {type(self).__name__}"
            )
        if self.adaptive_sigma is not None and not self.evaluate_centre:
            raise ConfigError(
                "adaptive_sigma compares the centre with its genomes: set evaluate_centre=True"
            )

    @property
    @override
    def asks_ahead(self) -> bool:
        return self.adaptive_sigma is None and not self.sharpness

    @override
    def check_run(self, search_space: SearchSpaceBuilder, num_generations: int) -> None:
        refuse_zero_sigma(self.sigma, self.sigma_schedule, num_generations)
        seeds = self.population_size // (1 + self.antithetic)
        if (groups := search_space.partitions) > 1 and not groups <= seeds <= SEEDS_OF_PARTITION:
            raise ConfigError(
                f"search_space.partitions needs {groups:,} to {SEEDS_OF_PARTITION:,} seeds per "
                f"generation here, and optimizer.population_size={self.population_size} gives "
                f"{seeds:,}" + ", one per mirrored pair" * self.antithetic
            )

    @override
    def rate_factor(self, generation: int, num_generations: int) -> float:
        """Return the learning rate's schedule times the warm-up."""
        factor = self.learning_rate_schedule(generation, num_generations)
        return factor * warmup(generation, self.warmup_generations)

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> "ESOptimizer":
        return ESOptimizer(self, run_seed, num_generations, space)


class ESOptimizer(Optimizer):
    """`ask` depends on the run seed, the generation and, if σ adapts, on what `tell` was given."""

    def __init__(self, config: ES, run_seed: int, num_generations: int, space: SearchSpace) -> None:
        self._config = config
        self.run_seed = run_seed
        self._signs = (1, -1) if config.antithetic else (1,)
        self.num_seeds = config.population_size // len(self._signs)
        self._moved_away: tuple[Term, ...] = ()
        """Terms that the centre was moved by, to be taken back."""
        self._is_partitioned = space.shares.num_partitions > 1
        self._num_generations = num_generations
        self._sigma_factor = 1.0
        self._rms_T: list[float] = []
        """RMS of the fitness of each generation that had a signal."""
        self._told = -1, 1.0
        """The generation that was told last, and the factor on its sigma."""

    def sigma(self, generation: int) -> float:
        """Return the base sigma times its schedule and adapted factor."""
        factor = self._config.sigma_schedule(generation, self._num_generations)
        told, its_factor = self._told
        adapted = its_factor if generation == told else self._sigma_factor
        return number(self._config.sigma) * factor * adapted

    def rate_factor(self, generation: int) -> float:
        """Return the learning rate's schedule times the warm-up."""
        return self._config.rate_factor(generation, self._num_generations)

    @override
    def learning_rate(self, generation: int) -> float:
        """Return the factor on the given fitness: the base rate times schedule and warm-up."""
        return self._rate(generation) / (self.rms if self.divides_fitness else 1.0)

    def _rate(self, generation: int) -> float:
        return number(self._config.learning_rate) * self.rate_factor(generation)

    @property
    def rms(self) -> float:
        """RMS of the fitness so far; 1 before there was any."""
        return _rms(self._rms_T) if self._rms_T else 1.0

    @override
    def metrics(self) -> Mapping[str, float]:
        return {"fitness/rms": self.rms} if self.divides_fitness else {}

    def ask(self, generation: int) -> list[Genome]:
        """Return genomes of new seeds; with antithetic, 2i and 2i + 1 are +σ and -σ of one seed."""
        sigma = self.sigma(generation)
        genomes_G = [
            Genome((Term(self.seed(generation, i), sign * sigma),))
            for i in range(self.num_seeds)
            for sign in self._signs
        ]
        return genomes_G + [Genome()] * self._config.evaluate_centre

    @override
    def begin_after(self, steps: Sequence[Step]) -> None:
        if self._config.sharpness and len(steps) % 2:
            raise ConfigError(
                "optimizer.sharpness makes a step of two generations: fork at an even generation, "
                f"found {len(steps)}"
            )

    def seed(self, generation: int, i: int) -> int:
        """Return seed i of a generation."""
        if self._is_partitioned:
            return partition_seed(derive_seed(self.run_seed, "partition", generation), i)
        return derive_seed(self.run_seed, "genome", generation, i)

    def tell(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: Floats | None,
        fitness_G: Floats,
    ) -> Step:
        """Return a step with one term per seed, in the genomes' order; none if twins tie."""
        if self.divides_fitness:
            present = fitness_G[~np.isnan(fitness_G)]
            if present.any():
                self._rms_T.append(_rms(present.tolist()))
            fitness_G = fitness_G / self.rms
        self._told = generation, self._sigma_factor
        if (adapt := self._config.adaptive_sigma) is not None:
            self._sigma_factor = adapt(self._sigma_factor, genomes_G, fitness_G.tolist())
        if self._config.sharpness and generation % 2 == 0:
            self._moved_away = ()
            if generation + 1 < self._num_generations:
                # centre <- centre - ρ g
                self._moved_away = self.gradient(genomes_G, fitness_G, -self._config.sharpness)
                return Step(self._moved_away)
        step = self.move(generation, genomes_G, fitness_G)
        decay = self._config.weight_decay * self.rate_factor(generation)
        if not (step.terms or step.rule or self._moved_away):
            return step
        back = tuple(Term(t.seed, -(1 - decay) * t.coefficient) for t in self._moved_away)
        return dataclasses.replace(step, terms=(*back, *step.terms), decay=decay)

    def move(self, generation: int, genomes_G: Sequence[Genome], fitness_G: Floats) -> Step:
        """Return the step without decay: plain ES's α · g."""
        return Step(self.gradient(genomes_G, fitness_G, self._rate(generation)))

    def gradient(
        self, genomes_G: Sequence[Genome], fitness_G: Floats, rate: float
    ) -> tuple[Term, ...]:
        """Return `weighted_sum` of fitness less the centre's, if that was evaluated and not lost.

        In mirrored pairs it would cancel, and leave rounding behind.
        """
        if self._config.evaluate_centre and not self._config.antithetic:
            (centre,) = (i for i, genome in enumerate(genomes_G) if not genome.terms)
            if not np.isnan(fitness_G[centre]):
                fitness_G = fitness_G - fitness_G[centre]
        return weighted_sum(genomes_G, fitness_G, rate)


def _rms(values: Sequence[float]) -> float:
    # Exactly rounded, and without squares that overflow.
    return math.hypot(*values) / math.sqrt(len(values))


def step_length(es: Mapping[str, object], share: float = 1.0) -> Auto:
    """Return a share of the RMS of plain ES's step, α/√N, for fitness of unit variance."""
    if (rate := es["learning_rate"]) == AUTO:
        return AUTO
    return share * cast(float, rate) / math.sqrt(cast(int, es["population_size"]))


def weighted_sum(genomes_G: Sequence[Genome], fitness_G: Floats, rate: float) -> tuple[Term, ...]:
    """Return rate/N · Σ_g fitness_g · sign_g · ε(seed_g), one term per seed, by genome.

    A genome without terms, the centre, is not counted; see the module's text for lost ones.
    """
    signed_fitness: dict[int, list[float]] = {}
    for genome, fitness in zip(genomes_G, fitness_G.tolist(), strict=True):
        for term in genome.terms:
            signed = math.copysign(1, term.coefficient) * fitness
            signed_fitness.setdefault(term.seed, []).append(signed)
    # Of twins, fitness₊ - fitness₋; a NaN spreads, so a pair with a lost twin is left out.
    totals = {seed: sum(values) for seed, values in signed_fitness.items()}
    kept = {seed: total for seed, total in totals.items() if not math.isnan(total)}
    if not kept:
        return ()
    # α/N · Σ fitness · sign · ε, with N the genomes that were not lost
    scale = rate / sum(len(signed_fitness[seed]) for seed in kept)
    return tuple(Term(seed, scale * total) for seed, total in kept.items() if scale * total)


def merged(
    genomes_G: Sequence[Genome], fitness_G: Floats, old_seeds: Collection[int], rate: float
) -> tuple[Term, ...]:
    """Merge all genomes' terms into one step: the form of ES in which genomes inherit seeds.

    Inherited seeds come first, in the order of their first holder, each with the mean of its
    coefficients over the genomes that hold it, lost ones too. Then those that were tried for the
    first time, with the gradient, `weighted_sum`.
    """
    held: dict[int, list[float]] = {}
    for genome in genomes_G:
        for term in genome.terms:
            if term.seed in old_seeds:
                held.setdefault(term.seed, []).append(term.coefficient)
    means = [Term(seed, math.fsum(values) / len(values)) for seed, values in held.items()]
    tried_G = [Genome(tuple(t for t in g.terms if t.seed not in old_seeds)) for g in genomes_G]
    return (*means, *weighted_sum(tried_G, fitness_G, rate))
