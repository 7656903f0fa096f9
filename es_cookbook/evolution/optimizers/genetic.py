"""A genetic algorithm on seeds: individuals breed, and the best of them is the centre.

Deep GA (Such et al. 2017, arXiv:1712.06567), with crossover, species (Stanley and Miikkulainen
2002) and islands. A child has the genes of a parent, or of two crossed, and one new mutation:

    child = cross(tournament, tournament) or tournament;   child <- child + σ ε(new seed)

The centre is always the champion, the fittest of the last generation that said anything: exactly
the base and its genes' terms, in the order of birth. So what is evaluated, saved and exported is an
individual that was tried. A genome is what another differs from it (`genealogy.difference`).

That is how long genealogies fit into an engine that hosts few terms a genome: what an individual
shares with the champion is in the centre's weights and costs nothing. Who differs from the champion
by `max_terms` genes or more has outgrown the engine and breeds no more; if that is a whole island,
its children are the champion's. A cross that would be so far is not made, and the first parent
breeds alone.

Traps. A line gains a gene a generation, so two that parted t generations ago differ by 2 t, and
`max_terms` is also how long a niche or an island may keep to itself. Relatives are near only where
selection is strong: truncation, larger tournaments, fewer elites. And luck: the champion is the
best of many that were tried on few problems. Elites are tried again, on the next ones.

What was tied says nothing: a generation in which all fitness is equal changes neither champion nor
parents, and the next one has other children of the same parents. Lost genomes (NaN) do not breed.

`es_weight` mixes in evolution strategies: over the new mutations, α/N · Σ fitness · ε is added to a
trunk that all individuals have, so that all move alike and no genome grows; the mean of the
mutants is the baseline.

Cost: noise of one term a generation while the champion's line goes on; of all its genes (with
`es_weight`: and of the whole trunk) when another line takes over, in time and in the history. Of
the terms of all genomes when they are loaded. Memory: a few megabytes of genes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.configs import Names
from es_cookbook.errors import ConfigError
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.base import Optimizer, OptimizerBuilder
from es_cookbook.evolution.optimizers.es import weighted_sum
from es_cookbook.evolution.optimizers.genealogy import (
    BASE,
    Gene,
    Individual,
    difference,
    distance,
    in_order,
    step_between,
    terms,
    uniform,
    union,
)
from es_cookbook.evolution.optimizers.selection import (
    Parent,
    best_first,
    elites,
    quotas,
    species_of,
    tournament,
)
from es_cookbook.evolution.schedules import SCHEDULE_NAMES, Constant, Schedule
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.seeds import derive_seed

_CHANCE = 2.0**63
"""Above what `derive_seed` gives."""


@chz.chz
class Genetic(OptimizerBuilder):
    """A genetic algorithm (Such et al. 2017)."""

    sigma: float = chz.field(default=1e-3, doc="standard deviation of a mutation")
    sigma_schedule: Schedule = chz.field(
        default=Constant(),
        meta_factory=Names(SCHEDULE_NAMES, default="none"),
        doc="factor on sigma over the run",
    )
    antithetic: bool = chz.field(
        default=False, doc="children in pairs: the same parents, and mutations +σ·ε and -σ·ε"
    )
    num_elites: int = chz.field(
        default=1, doc="best individuals of an island that go on as they are"
    )
    tournament_size: int = chz.field(default=3, doc="individuals of whom the fittest breeds")
    truncation: float = chz.field(
        default=0.25, doc="share of an island (of each species), the best, that may breed"
    )
    crossover: Literal["uniform", "union"] = chz.field(
        default="uniform",
        doc="of two parents' genes: each as one of them has it, or all of both",
    )
    crossover_rate: float = chz.field(default=0.25, doc="share of children with two parents")
    max_terms: int = chz.field(
        default=8,
        doc="most terms of a genome: genes in which it differs from the champion; engine=vllm "
        "needs engine.terms_per_genome as large for low-rank genomes",
    )
    species_distance: int | None = chz.field(
        default=None,
        doc="most genes by which a member may differ from its species' best; unset: no species",
    )
    num_islands: int = chz.field(default=1, doc="populations that breed by themselves")
    migration_every: int = chz.field(
        default=5, doc="generations after which each island's best also joins the next island"
    )
    es_weight: float = chz.field(
        default=0.0, doc="α of an ES step over the new mutations that moves everybody; 0: none"
    )

    @chz.validate
    def _fields(self) -> None:
        for name in ("tournament_size", "max_terms", "num_islands", "migration_every"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, found {value}")
        for name in ("num_elites", "species_distance"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must be 0 or more, found {value}")
        smallest = self.num_islands * max(self.num_elites + 1, self.tournament_size)
        if self.population_size < smallest:
            raise ConfigError(
                f"population_size must be at least {smallest} for num_islands={self.num_islands}, "
                f"num_elites={self.num_elites} and tournament_size={self.tournament_size}, found "
                f"{self.population_size}"
            )
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise ConfigError(f"sigma must be above 0, found {self.sigma}")
        if not (math.isfinite(self.es_weight) and self.es_weight >= 0):
            raise ConfigError(f"es_weight must be 0 or more, found {self.es_weight}")
        if not 0 < self.truncation <= 1:
            raise ConfigError(f"truncation must be above 0 and at most 1, found {self.truncation}")
        if not 0 <= self.crossover_rate <= 1:
            raise ConfigError(f"crossover_rate must be in [0, 1], found {self.crossover_rate}")
        if self.crossover not in ("uniform", "union"):
            raise ConfigError(f"crossover must be uniform or union, found {self.crossover!r}")

    def __call__(
        self, *, run_seed: int, num_generations: int, space: SearchSpace
    ) -> "GeneticOptimizer":
        """Build it; refuses a sigma_schedule that reaches 0 within the run."""
        del space
        return GeneticOptimizer(self, run_seed, num_generations)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One of the population.

    Attributes:
        individual: its genes.
        island: where it lives.
        mutation: what is new in it; None for an elite.
    """

    individual: Individual
    island: int
    mutation: Gene | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Population:
    """A generation.

    Attributes:
        generation: which.
        members_G: everybody, in the order of the genomes.
        outgrown: how many did not breed, or were crossed and not born, because of `max_terms`.
        num_species: over all islands.
    """

    generation: int
    members_G: Sequence[Member]
    outgrown: int
    num_species: int


class GeneticOptimizer(Optimizer):
    """What it asks depends on the run seed, the generation and what was told.

    Args:
        config: its settings.
        run_seed: everything random derives from it.
        num_generations: the length of the run.

    Attributes:
        champion: the centre's own genes.

    Raises:
        ConfigError: A sigma_schedule that reaches 0 within the run.
    """

    def __init__(self, config: Genetic, run_seed: int, num_generations: int) -> None:
        self._config = config
        self._run_seed = run_seed
        self._num_generations = num_generations
        for generation in range(num_generations):
            if self.sigma(generation) == 0:
                raise ConfigError(
                    f"sigma_schedule reaches 0 at generation {generation} of {num_generations}; "
                    "sigma must stay above 0"
                )
        self.champion = BASE
        self._metrics: Mapping[str, float] = {}
        self._trunk: list[Gene] = []
        self._centre: list[Gene] = []
        self._islands = [[Parent(BASE, 0.0)] for _ in range(config.num_islands)]
        self._latest: Population | None = None

    def sigma(self, generation: int) -> float:
        """The base sigma times its schedule."""
        config = self._config
        return config.sigma * config.sigma_schedule(generation, self._num_generations)

    @property
    def max_terms(self) -> int:
        """As the config says."""
        return self._config.max_terms

    def begin_after(self, steps: Sequence[Step]) -> None:
        """Take what these steps added to the base as the trunk: everybody has it."""
        plain = True
        for step in steps:
            if step.decay == 1.0:
                self._trunk.clear()
            returns = step.decay == 1.0 or (plain and step.decay == 0.0)
            plain = returns and step.rule is None
            self._trunk += [Gene(-1, term.seed, term.coefficient) for term in step.terms]
        if not plain:
            raise ConfigError(
                "optimizer=genetic goes back to the base and adds terms, so it cannot go on after "
                "steps with weight decay or with a rule (of adam, muon or cma); fork a run of es, "
                "momentum, clip_up or genetic"
            )
        self._centre = list(self._trunk)

    def ask(self, generation: int) -> list[Genome]:
        """Island after island, each with its elites first, as differences from the champion."""
        members_G = self.population(generation).members_G
        return [Genome(difference(member.individual, self.champion)) for member in members_G]

    def tell(
        self, generation: int, genomes_G: Sequence[Genome], fitness_G: NDArray[np.float64]
    ) -> Step:
        """From the champion before to the champion now, and the ES step if there is one."""
        del genomes_G  # The same that `population` knows.
        if np.isinf(fitness_G).any():
            raise ValueError(f"fitness must be finite or NaN, found {fitness_G.tolist()}")
        asked, self._latest = self.population(generation), None
        self._metrics = {
            "genetic/outgrown": asked.outgrown,
            "genetic/species": asked.num_species,
        }
        pairs = zip(asked.members_G, fitness_G.tolist(), strict=True)
        told = [(member, fitness) for member, fitness in pairs if math.isfinite(fitness)]
        if len({fitness for _, fitness in told}) < 2:
            return Step()
        # Of equals the champion stays, or else the first.
        best, _ = max(told, key=lambda pair: (pair[1], pair[0].individual == self.champion))
        self.champion = best.individual
        self._islands = [
            best_first([Parent(m.individual, fitness) for m, fitness in told if m.island == i])
            for i in range(self._config.num_islands)
        ]
        if (generation + 1) % self._config.migration_every == 0:
            self._islands = migrated(self._islands)
        if self._config.es_weight:
            self._trunk += self._es_step(generation, told)
        before, self._centre = self._centre, in_order(self._trunk, self.champion)
        return step_between(before, self._centre)

    def metrics(self) -> Mapping[str, float]:
        """How many had outgrown `max_terms`, and how many species there were."""
        return self._metrics

    def population(self, generation: int) -> "Population":
        """Everybody of a generation."""
        if self._latest is None or self._latest.generation != generation:
            self._latest = self._bred(generation)
        return self._latest

    def _bred(self, generation: int) -> "Population":
        config = self._config
        members_G: list[Member] = []
        outgrown = num_species = 0
        for i, parents in enumerate(self._islands):
            near = [parent for parent in parents if self._is_near(parent.individual)]
            outgrown += len(parents) - len(near)
            species = species_of(near or [Parent(self.champion, 0.0)], config.species_distance)
            first, last = (
                config.population_size * island // config.num_islands for island in (i, i + 1)
            )
            kept = elites(species, config.num_elites)
            children, crosses = self._children(generation, first, last - first - len(kept), species)
            members_G += [Member(parent.individual, i) for parent in kept]
            members_G += [Member(individual | {gene}, i, gene) for individual, gene in children]
            outgrown += crosses
            num_species += len(species)
        return Population(generation, members_G, outgrown, num_species)

    def _children(
        self, generation: int, first: int, number: int, species: Sequence[Sequence[Parent]]
    ) -> tuple[list[tuple[Individual, Gene]], int]:
        """Bred genes with a mutation each, and how many crosses had outgrown.

        Args:
            generation: theirs.
            first: number that nobody of an earlier island has.
            number: how many.
            species: who breeds with whom.
        """
        config, sigma = self._config, self.sigma(generation)
        signs = (1, -1) if config.antithetic else (1,)
        matings = math.ceil(number / len(signs))
        pool_of = [
            members[: math.ceil(config.truncation * len(members))]
            for members, quota in zip(species, quotas(species, matings), strict=True)
            for _ in range(quota)
        ]
        children: list[tuple[Individual, Gene]] = []
        outgrown = 0
        for i, pool in enumerate(pool_of, start=first):
            bred = self._drawn(pool, "parent", generation, i).individual
            if self._derived("cross", generation, i) < config.crossover_rate * _CHANCE:
                mate = self._drawn(pool, "mate", generation, i).individual
                crossed = self._crossed(bred, mate, generation, i)
                if self._is_near(crossed):
                    bred = crossed
                else:
                    outgrown += 1
            seed = self._derived("genome", generation, i)
            birth = generation * (config.population_size + 1) + i
            children += [(bred, Gene(birth, seed, sign * sigma)) for sign in signs]
        return children[:number], outgrown

    def _drawn(self, pool: Sequence[Parent], purpose: str, generation: int, i: int) -> Parent:
        draws = range(self._config.tournament_size)
        return tournament(pool, [self._derived(purpose, generation, i, k) for k in draws])

    def _crossed(self, a: Individual, b: Individual, generation: int, i: int) -> Individual:
        if self._config.crossover == "union":
            return union(a, b)
        return uniform(a, b, lambda birth: self._derived("gene", generation, i, birth) % 2 == 0)

    def _is_near(self, individual: Individual) -> bool:
        """Whether it can be hosted with a mutation more."""
        return distance(individual, self.champion) < self._config.max_terms

    def _es_step(self, generation: int, told: Sequence[tuple[Member, float]]) -> list[Gene]:
        """What the new mutations say about the trunk, their mean fitness being the baseline."""
        tried = [(m.mutation, fitness) for m, fitness in told if m.mutation is not None]
        if not tried:
            return []
        mean = math.fsum(fitness for _, fitness in tried) / len(tried)
        genomes_G = [Genome(terms([gene])) for gene, _ in tried]
        relative_G = np.array([fitness - mean for _, fitness in tried])
        birth = generation * (self._config.population_size + 1) + self._config.population_size
        step = weighted_sum(genomes_G, relative_G, self._config.es_weight)
        return [Gene(birth, term.seed, term.coefficient) for term in step]

    def _derived(self, purpose: str, *indices: int) -> int:
        return derive_seed(self._run_seed, purpose, *indices)


def migrated(islands: Sequence[Sequence[Parent]]) -> list[list[Parent]]:
    """In a ring, each island's best also joins the next one, in place of the worst there.

    Args:
        islands: each best first; whoever is alone in one stays.
    """
    if len(islands) == 1:
        return [list(parents) for parents in islands]
    return [
        best_first([*parents[: max(1, len(parents) - 1)], *islands[i - 1][:1]])
        for i, parents in enumerate(islands)
    ]
