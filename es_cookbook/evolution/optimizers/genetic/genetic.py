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

Species keep to themselves who differ in genes, or (`species_by=behaviour`) in what they solve:
mean |difference| of rewards over the problems that both have. Behaviour is only compared within a
generation, in which all attempt the same problems: the last one that said anything, from which all
parents are, migrants between islands too. Its trap: sampled answers differ by luck, so that an
individual is some way from itself, and `species_distance` must be more than that. Whoever is alone
in a species breeds, so many small ones are little selection.

What was tied says nothing: a generation in which all fitness is equal changes neither champion nor
parents, and the next one has other children of the same parents. Lost genomes (NaN) do not breed.

`es_weight` mixes in evolution strategies: over the new mutations, α/N · Σ fitness · ε is added to a
trunk that all individuals have, so that all move alike and no genome grows; the mean of the
mutants is the baseline.

`merge_every` makes one of all, as seeds-based codes do (`es.merged`): each inherited gene with the
mean of its holders' coefficients, the new mutations by their fitness as in an ES step of α
`es_weight`. That is the trunk from then on, and everybody begins at it without genes, within any
engine's rank again. Trap: a gene that one holds counts as much as one that all hold, so merge after
selection has left few lines.

Cost: noise of one term a generation while the champion's line goes on; of all its genes (with
`es_weight`: and of the whole trunk) when another line takes over, in time and in the history. Of
the terms of all genomes when they are loaded. Memory: a few megabytes of genes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.base import (
    Optimizer,
    OptimizerBuilder,
    refuse_zero_sigma,
)
from es_cookbook.evolution.optimizers.es import merged, weighted_sum
from es_cookbook.evolution.optimizers.genetic.breeding import (
    Breeding,
    Member,
    Population,
    birth_of,
    migrated,
)
from es_cookbook.evolution.optimizers.genetic.genealogy import (
    BASE,
    Gene,
    difference,
    in_order,
    step_between,
    terms,
)
from es_cookbook.evolution.optimizers.genetic.selection import DISTANCES, Parent, best_first
from es_cookbook.evolution.schedules import SCHEDULE_NAMES, Constant, Schedule
from es_cookbook.evolution.spaces.base import SearchSpace


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
    species_by: Literal["seeds", "behaviour"] = chz.field(
        default="seeds",
        doc="what makes a species: genes, or rewards problem by problem (then in the history too)",
    )
    species_distance: float | None = chz.field(
        default=None,
        doc="most by which a member may differ from its species' best: genes, or with "
        "species_by=behaviour the mean difference of rewards (0 to their range); unset: no species",
    )
    num_islands: int = chz.field(default=1, doc="populations that breed by themselves")
    migration_every: int = chz.field(
        default=5, doc="generations after which each island's best also joins the next island"
    )
    es_weight: float = chz.field(
        default=0.0, doc="α of an ES step over the new mutations that moves everybody; 0: none"
    )

    merge_every: int = chz.field(
        default=0, doc="generations after which all individuals are merged into one; 0: never"
    )

    @chz.validate
    def _fields(self) -> None:
        counts = ("tournament_size", "max_terms", "num_islands", "migration_every")
        check_range(self, *counts, at_least=1)
        not_negative = ("merge_every", "num_elites", "species_distance", "es_weight")
        check_range(self, *not_negative, at_least=0)
        check_range(self, "sigma", above=0)
        check_range(self, "truncation", above=0, at_most=1)
        check_range(self, "crossover_rate", at_least=0, at_most=1)
        if self.species_by not in DISTANCES:
            raise ConfigError(
                f"species_by must be {' or '.join(DISTANCES)}, found {self.species_by!r}"
            )
        if self.species_distance is None and self.species_by != "seeds":
            raise ConfigError(
                f"species_by={self.species_by} needs species_distance: how much a member's "
                "rewards may differ from those of its species' best, 0.1 for example"
            )
        smallest = self.num_islands * max(self.num_elites + 1, self.tournament_size)
        if self.population_size < smallest:
            raise ConfigError(
                f"population_size must be at least {smallest} for num_islands={self.num_islands}, "
                f"num_elites={self.num_elites} and tournament_size={self.tournament_size}, found "
                f"{self.population_size}"
            )
        if self.crossover not in ("uniform", "union"):
            raise ConfigError(f"crossover must be uniform or union, found {self.crossover!r}")

    def __call__(
        self, *, run_seed: int, num_generations: int, space: SearchSpace
    ) -> "GeneticOptimizer":
        """Build it; refuses a sigma_schedule that reaches 0 within the run."""
        del space
        return GeneticOptimizer(self, run_seed, num_generations)


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
        refuse_zero_sigma(self.sigma, num_generations)
        self.champion = BASE
        self._metrics: Mapping[str, float] = {}
        self._trunk: list[Gene] = []
        self._centre: list[Gene] = []
        self._islands = [[Parent(BASE, 0.0)] for _ in range(config.num_islands)]
        self._latest: Population | None = None
        self.records_scores = config.species_by == "behaviour"

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
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: NDArray[np.float64] | None,
        fitness_G: NDArray[np.float64],
    ) -> Step:
        """From the champion before to the champion now, and the ES step if there is one."""
        del genomes_G  # The same that `population` knows.
        if np.isinf(fitness_G).any():
            raise ValueError(f"fitness must be finite or NaN, found {fitness_G.tolist()}")
        asked, self._latest = self.population(generation), None
        behaviour_G: list[tuple[float, ...]] = [()] * len(asked.members_G)
        if self.records_scores:
            if scores_P_G is None:
                raise ValueError("with species_by=behaviour, tell needs scores_P_G")
            behaviour_G = [tuple(scores_P) for scores_P in scores_P_G.T.tolist()]
        self._metrics = {
            "genetic/outgrown": asked.outgrown,
            "genetic/species": asked.num_species,
        }
        all_G = zip(asked.members_G, fitness_G.tolist(), behaviour_G, strict=True)
        told = [
            (member, Parent(member.individual, fitness, scores_P))
            for member, fitness, scores_P in all_G
            if math.isfinite(fitness)
        ]
        if len({parent.fitness for _, parent in told}) < 2:
            return Step()
        # Of equals the champion stays, or else the first.
        _, best = max(told, key=lambda pair: (pair[1].fitness, pair[1].individual == self.champion))
        self.champion = best.individual
        self._islands = [
            best_first([parent for member, parent in told if member.island == i])
            for i in range(self._config.num_islands)
        ]
        if (generation + 1) % self._config.migration_every == 0:
            self._islands = migrated(self._islands)
        if self._config.merge_every and (generation + 1) % self._config.merge_every == 0:
            self._trunk += self._merged(generation, told)
            self.champion = BASE
            self._islands = [[Parent(BASE, 0.0)] for _ in self._islands]
        elif self._config.es_weight:
            self._trunk += self._es_step(generation, told)
        before, self._centre = self._centre, in_order(self._trunk, self.champion)
        return step_between(before, self._centre)

    def metrics(self) -> Mapping[str, float]:
        """How many had outgrown `max_terms`, and how many species there were."""
        return self._metrics

    def population(self, generation: int) -> Population:
        """Everybody of a generation."""
        if self._latest is None or self._latest.generation != generation:
            sigma = self.sigma(generation)
            breeding = Breeding(self._config, self._run_seed, generation, sigma, self.champion)
            self._latest = breeding.population(self._islands)
        return self._latest

    def _merged(self, generation: int, told: Sequence[tuple[Member, Parent]]) -> list[Gene]:
        """Everybody's genes as one individual's; see `es.merged`."""
        new = {member.mutation.seed for member, _ in told if member.mutation is not None}
        births = {gene.seed: gene.birth for _, parent in told for gene in parent.individual}
        mean = math.fsum(parent.fitness for _, parent in told) / len(told)
        genomes_G = [Genome(terms(sorted(parent.individual))) for _, parent in told]
        relative_G = np.array([parent.fitness - mean for _, parent in told])
        all_terms = merged(genomes_G, relative_G, births.keys() - new, self._config.es_weight)
        return [Gene(births[term.seed], term.seed, term.coefficient) for term in all_terms]

    def _es_step(self, generation: int, told: Sequence[tuple[Member, Parent]]) -> list[Gene]:
        """What the new mutations say about the trunk, their mean fitness being the baseline."""
        tried = [(m.mutation, p.fitness) for m, p in told if m.mutation is not None]
        if not tried:
            return []
        mean = math.fsum(fitness for _, fitness in tried) / len(tried)
        genomes_G = [Genome(terms([gene])) for gene, _ in tried]
        relative_G = np.array([fitness - mean for _, fitness in tried])
        birth = birth_of(self._config, generation, self._config.population_size)
        step = weighted_sum(genomes_G, relative_G, self._config.es_weight)
        return [Gene(birth, term.seed, term.coefficient) for term in step]
