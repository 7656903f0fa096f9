"""A genetic algorithm on seeds: individuals breed, and the fittest of them is the centre.

Deep GA (Such et al. 2017, arXiv:1712.06567) with crossover, species (Stanley and Miikkulainen 2002)
and islands. A child has the genes of one parent, or of two crossed, and one new mutation:

    child = cross(tournament, tournament) or tournament;   child <- child + σ ε(new seed)

An individual is a set of genes. A gene is a seed and its coefficient, and an individual's weights
are the base plus its genes' terms in the order of their birth. That order is the same in all
individuals, so equal sets have equal weights, to the bit, however they were bred. Shared genes,
distances and crossover are set arithmetic.

The centre is the champion: the fittest individual of the last generation whose fitness was not all
equal. A genome is the difference between an individual and the champion (`difference`), so shared
genes cost nothing, and long genealogies fit into an engine that hosts few terms per genome. An
individual that differs from the champion by `max_terms` genes or more does not breed; if a cross
would differ that much, the first parent breeds alone. An island without parents restarts from the
champion.

A generation of equal fitness changes neither champion nor parents; the next one has other children
of the same parents. Lost genomes (NaN) do not breed.

Tournaments use only the order, so the shaping of rewards into fitness does not matter. Species keep
a niche alive while it is still worse than the best: similar individuals compete with each other,
and the number of a species' children follows from its *mean* rank, not from its size (fitness
sharing, over ranks because centred fitness is negative for half of them).

Similarity is by genes, which tells relatives from strangers, or (`species_by=behaviour`) by what
individuals solve, as in novelty search (Lehman and Stanley 2011): the mean |difference| of scores
over the problems that both have. Behaviour is compared within a generation only, where all attempt
the same problems.

`es_weight` mixes in evolution strategies: α/N · Σ fitness · ε over the new mutations, with their
mean fitness as the baseline, is added to a trunk of terms that all individuals share. α is
`es_weight` times its schedule.

`merge_every` replaces the population by one individual (`es.merged`): each inherited gene with the
mean of its holders' coefficients, and the new mutations by fitness, as in an ES step of α
`es_weight`. It becomes the trunk, and all individuals restart there without genes.

Traps:

- Two lines that parted t generations ago differ by 2 t genes, so `max_terms` also limits how long a
  niche or an island stays apart. Strong selection (truncation, larger tournaments, fewer elites)
  keeps relatives close.
- The champion is the best of many that were tried on few problems, and so partly lucky. Elites are
  tried again, on the next problems.
- Sampled answers vary, so `species_distance` by behaviour must be larger than the difference
  between two attempts of one individual. Small species select little.
- In a merge, a gene that one individual holds counts as much as one that all hold: merge after
  selection has left few lines.

Cost: the noise of one term per generation while the champion's line goes on; when another line
takes over, that of all its genes (with `es_weight`, of the whole trunk too), in time and in the
history. Loading takes the noise of the terms of all genomes. Memory: a few megabytes of genes.

Left out: a step of a policy gradient as a parent (model merging, surveyed in arXiv:2408.07666).
Genes are seeds, and K seeds hold only K/d of a gradient's squared length in d dimensions. A run may
begin from a gradient's checkpoint instead, and a gradient from a run (`model_name=runs/mine`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias, cast

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.fitness import Floats, average_ranks
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.optimizers.base import (
    AUTO,
    Auto,
    Optimizer,
    OptimizerBuilder,
    number,
    refuse_zero_sigma,
)
from es_cookbook.evolution.optimizers.es import merged, weighted_sum
from es_cookbook.evolution.schedules import Constant, Cosine, Schedule, schedule_field
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder

_CHANCE = 2.0**63
"""The exclusive upper bound of `derive_seed`."""


class Gene(NamedTuple):
    """coefficient · ε(seed), and when it was first tried.

    Attributes:
        birth: the order of terms; no two seeds of one run's mutations share it.
        seed: 0 … 2⁶³ - 1.
        coefficient: ± σ of that generation.
    """

    birth: int
    seed: int
    coefficient: float


Individual: TypeAlias = frozenset[Gene]
"""At most one gene per birth."""
BASE: Individual = frozenset()
"""The base model, from which all individuals descend."""


def terms(genes: Iterable[Gene]) -> tuple[Term, ...]:
    """Return genes as terms, in the order given."""
    return tuple(Term(gene.seed, gene.coefficient) for gene in genes)


def difference(individual: Individual, centre: Individual) -> tuple[Term, ...]:
    """Return the terms that turn the centre into this individual, oldest first.

    Genes that the centre lacks, and the negative of genes that only the centre has.
    >>> difference(frozenset({Gene(0, 7, 0.5), Gene(2, 9, 0.5)}), frozenset({Gene(0, 7, 0.5)}))
    (Term(seed=9, coefficient=0.5),)
    """
    return tuple(
        Term(gene.seed, gene.coefficient if gene in individual else -gene.coefficient)
        for gene in sorted(individual ^ centre)
    )


def uniform(a: Individual, b: Individual, from_a: Callable[[int], bool]) -> Individual:
    """Take each gene as in `a` if the coin `from_a(birth)` says so, else as in `b`.

    Genes of both are always kept.
    """
    return (a & b) | {gene for gene in a ^ b if (gene in a) == from_a(gene.birth)}


def in_order(trunk: Sequence[Gene], individual: Individual) -> list[Gene]:
    """Return the genes of the trunk and of an individual in the order of their terms."""
    return sorted((*trunk, *individual), key=lambda gene: gene.birth)


def step_between(before: Sequence[Gene], after: Sequence[Gene]) -> Step:
    """Return the step from a centre of the genes `before` to one of `after`; both `in_order`.

    New genes at the end are added. Otherwise the step returns to the base and adds all terms again:
    subtracting terms would leave their rounding behind.
    """
    if after[: len(before)] == before:
        return Step(terms(after[len(before) :]))
    return Step(terms(after), decay=1.0)


class Parent(NamedTuple):
    """An individual of a population.

    Attributes:
        individual: its genes.
        fitness: fitness in its generation; NaN before it was tried, and if it was lost.
        scores_P: its behaviour, NaN where a score is missing; empty if species go by seeds.
        island: index of its island.
        mutation: its new gene; None for an elite.
    """

    individual: Individual
    fitness: float = math.nan
    scores_P: tuple[float, ...] = ()
    island: int = 0
    mutation: Gene | None = None


def genes_apart(a: Parent, b: Parent) -> float:
    """Count the genes in which two individuals differ (Stanley and Miikkulainen 2002).

    It is not divided by the number of genes: that share would shrink as genealogies grow.
    """
    return len(a.individual ^ b.individual)


def behaviour_apart(a: Parent, b: Parent) -> float:
    """Return the distance of two individuals of a generation: mean |difference| of rewards.

    The mean is over the problems on which both have a reward; infinity if there are none. For
    rewards 0 and 1 it is the share of problems that exactly one of them solves.

    >>> behaviour_apart(Parent(frozenset(), 0.5, (1.0, 0.0)), Parent(frozenset(), 0.5, (0.5, 1.0)))
    0.75
    """
    pairs = zip(a.scores_P, b.scores_P, strict=True)
    gaps = [abs(one - other) for one, other in pairs if not math.isnan(one - other)]
    return math.fsum(gaps) / len(gaps) if gaps else math.inf


def best_first(parents: Sequence[Parent]) -> list[Parent]:
    """Sort by fitness; equals keep their order."""
    return sorted(parents, key=lambda parent: -parent.fitness)


def tournament(parents: Sequence[Parent], draws: Sequence[int]) -> Parent:
    """Return the fittest of the drawn parents, the first of equals; `draws` are large integers."""
    return max((parents[draw % len(parents)] for draw in draws), key=lambda parent: parent.fitness)


def species_of(
    parents: Sequence[Parent], apart: Callable[[Parent, Parent], float], threshold: float | None
) -> list[list[Parent]]:
    """Put each parent into the first species whose best member is within `threshold`.

    None makes one species. The parents are sorted best first, and so are species and members.
    """
    if threshold is None:
        return [list(parents)]
    species: list[list[Parent]] = []
    for parent in parents:
        for members in species:
            if apart(parent, members[0]) <= threshold:
                members.append(parent)
                break
        else:
            species.append([parent])
    return species


def elites(species: Sequence[Sequence[Parent]], number: int) -> list[Parent]:
    """Return the best of each species, then the second best of each, and so on."""
    places = [(place, -p.fitness) for members in species for place, p in enumerate(members)]
    flat = [parent for members in species for parent in members]
    order = sorted(range(len(flat)), key=places.__getitem__)
    return [flat[i] for i in order[:number]]


def quotas(species: Sequence[Sequence[Parent]], number: int) -> list[int]:
    """Return how many children each species has, by its mean rank; the worst rank is 1.

    >>> one, other = [Parent(frozenset(), f) for f in (1.0, 1.0)], [Parent(frozenset(), 4.0)]
    >>> quotas([other, one], 9)
    [6, 3]
    """
    of_species = [np.array([parent.fitness for parent in members]) for members in species]
    of_all = np.concatenate(of_species)
    means = [float((average_ranks(fitness, of_all) + 1).mean()) for fitness in of_species]
    shares = [number * mean / sum(means) for mean in means]
    counts = [int(share) for share in shares]
    # The rest goes to the largest remainders.
    by_remainder = sorted(range(len(shares)), key=lambda s: counts[s] - shares[s])
    for s in by_remainder[: number - sum(counts)]:
        counts[s] += 1
    return counts


def parents_of(
    species: Sequence[Sequence[Parent]], number: int, truncation: float
) -> list[Sequence[Parent]]:
    """Return the possible parents of each child: the best `truncation` of a species, rounded up."""
    return [
        members[: math.ceil(truncation * len(members))]
        for members, quota in zip(species, quotas(species, number), strict=True)
        for _ in range(quota)
    ]


def migrated(islands: Sequence[Sequence[Parent]]) -> list[list[Parent]]:
    """Replace the worst of each island by a copy of the best of the island before it in a ring.

    Islands are sorted best first; the only parent of an island stays.
    """
    if len(islands) == 1:
        return [list(parents) for parents in islands]
    return [
        best_first([*parents[: max(1, len(parents) - 1)], *islands[i - 1][:1]])
        for i, parents in enumerate(islands)
    ]


@chz.chz
class Genetic(OptimizerBuilder):
    """A genetic algorithm (Such et al. 2017)."""

    finds: ClassVar[Collection[str]] = ("sigma",)

    sigma: Auto = chz.field(
        default=1e-3,
        doc="standard deviation of a mutation; auto finds it before the first generation",
    )
    sigma_schedule: Schedule = schedule_field("factor on sigma over the run")
    num_elites: int = chz.field(
        default=1, doc="best individuals of an island that go on as they are"
    )
    tournament_size: int = chz.field(default=3, doc="individuals of whom the fittest breeds")
    truncation: float = chz.field(
        default=0.25, doc="share of an island (of each species), the best, that may breed"
    )
    crossover: Literal["uniform", "union"] = chz.field(
        default="uniform", doc="uniform: each gene as one parent has it; union: all genes of both"
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
        default=0.0, doc="α of an ES step over the new mutations, for all individuals; 0: none"
    )
    es_weight_schedule: Schedule = schedule_field("factor on es_weight over the run")
    merge_every: int = chz.field(
        default=0, doc="generations after which all individuals are merged into one; 0: never"
    )

    @classmethod
    @override
    def carried(cls, es: Mapping[str, object]) -> dict[str, object]:
        """Return a smaller sigma that decays: mutations add up, and champions are partly lucky."""
        given = es["sigma"]
        sigma = given if given == AUTO else 0.4 * cast(float, given)
        return {**super().carried(es), "sigma": sigma, "sigma_schedule": Cosine()}

    @chz.validate
    def _fields(self) -> None:
        counts = ("tournament_size", "max_terms", "num_islands", "migration_every")
        check_range(self, *counts, at_least=1)
        not_negative = ("merge_every", "num_elites", "species_distance", "es_weight")
        check_range(self, *not_negative, at_least=0)
        check_range(self, "sigma", above=0)
        check_range(self, "truncation", above=0, at_most=1)
        check_range(self, "crossover_rate", at_least=0, at_most=1)
        if not self.es_weight and self.es_weight_schedule != Constant():
            raise ConfigError(
                "es_weight_schedule is a factor on es_weight, which is 0: set es_weight above 0"
            )
        if self.species_distance is None and self.species_by != "seeds":
            raise ConfigError(
                f"species_by={self.species_by} needs species_distance=...: how much a member's "
                "rewards may differ from those of its species' best, 0.1 for example"
            )
        smallest = max(2, self.num_islands * max(self.num_elites + 1, self.tournament_size))
        if self.population_size < smallest:
            raise ConfigError(
                f"population_size must be at least {smallest} for num_islands={self.num_islands}, "
                f"num_elites={self.num_elites} and tournament_size={self.tournament_size}, found "
                f"{self.population_size}"
            )

    @override
    def check_run(self, search_space: SearchSpaceBuilder, num_generations: int) -> None:
        refuse_zero_sigma(self.sigma, self.sigma_schedule, num_generations)

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> Optimizer:
        return _GeneticOptimizer(self, run_seed, num_generations)


class _Population(NamedTuple):
    """A generation, in the order of the genomes.

    `outgrown` counts parents and crosses that `max_terms` excluded.
    """

    generation: int
    members_G: Sequence[Parent]
    outgrown: int
    num_species: int


class _GeneticOptimizer(Optimizer):
    """The genomes depend on the run seed, the generation and earlier results.

    Attributes:
        champion: the centre's genes without the trunk.
    """

    def __init__(self, config: Genetic, run_seed: int, num_generations: int) -> None:
        self._config = config
        self._run_seed = run_seed
        self._num_generations = num_generations
        self.champion = BASE
        self._metrics: Mapping[str, float] = {}
        self._trunk: list[Gene] = []
        self._centre: list[Gene] = []
        self._islands = [[Parent(BASE, 0.0)] for _ in range(config.num_islands)]
        self._latest: _Population | None = None
        self.records_scores = config.species_by == "behaviour"
        self.max_terms = config.max_terms

    def sigma(self, generation: int) -> float:
        """Return the base sigma times its schedule."""
        factor = self._config.sigma_schedule(generation, self._num_generations)
        return number(self._config.sigma) * factor

    @override
    def learning_rate(self, generation: int) -> float | None:
        """Return the α of the ES step, `es_weight` times its schedule; None without one."""
        factor = self._config.es_weight_schedule(generation, self._num_generations)
        return self._config.es_weight * factor if self._config.es_weight else None

    def begin_after(self, steps: Sequence[Step]) -> None:
        """Take the terms that these steps added to the base as the trunk of all individuals."""
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
        """Return the individuals as differences from the champion, by island, elites first."""
        members_G = self.population(generation).members_G
        return [Genome(difference(member.individual, self.champion)) for member in members_G]

    def tell(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: Floats | None,
        fitness_G: Floats,
    ) -> Step:
        """Return the step from the old champion to the new one, and the ES step if there is one."""
        population = self.population(generation)
        tested = self._tested(population.members_G, scores_P_G, fitness_G)
        self._latest = None
        self._metrics = {
            "genetic/outgrown": population.outgrown,
            "genetic/species": population.num_species,
        }
        if len({parent.fitness for parent in tested}) < 2:
            return Step()
        self._select(tested)
        if _is_due(self._config.migration_every, generation):
            self._islands = migrated(self._islands)
        if _is_due(self._config.merge_every, generation):
            self._merge(generation, tested)
        elif self._config.es_weight:
            self._trunk += self._es_step(generation, tested)
        before, self._centre = self._centre, in_order(self._trunk, self.champion)
        return step_between(before, self._centre)

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of outgrown individuals and of species."""
        return self._metrics

    def population(self, generation: int) -> _Population:
        """Return all individuals of a generation, by island, elites first."""
        if self._latest is None or self._latest.generation != generation:
            self._latest = self._bred(generation)
        return self._latest

    def _bred(self, generation: int) -> _Population:
        """Breed the elites of each island, and children of parents that can be hosted."""
        config = self._config
        apart = genes_apart if config.species_by == "seeds" else behaviour_apart
        members_G: list[Parent] = []
        outgrown = num_species = 0
        for i, parents in enumerate(self._islands):
            near = [parent for parent in parents if self._is_near(parent.individual)]
            species = species_of(
                near or [Parent(self.champion, 0.0)], apart, config.species_distance
            )
            kept = elites(species, config.num_elites)
            members_G += [Parent(parent.individual, island=i) for parent in kept]
            first, end = (config.population_size * n // config.num_islands for n in (i, i + 1))
            pools = parents_of(species, end - first - len(kept), config.truncation)
            children = [self._child(generation, n, pool) for n, pool in enumerate(pools, first)]
            members_G += [
                Parent(inherited | {new}, island=i, mutation=new) for inherited, new, _ in children
            ]
            outgrown += len(parents) - len(near) + sum(crossed for *_, crossed in children)
            num_species += len(species)
        return _Population(generation, members_G, outgrown, num_species)

    def _child(
        self, generation: int, n: int, pool: Sequence[Parent]
    ) -> tuple[Individual, Gene, bool]:
        """Return inherited genes and mutation of child n, and whether its cross had outgrown."""
        config = self._config

        def derived(purpose: str, *indices: int) -> int:
            return derive_seed(self._run_seed, purpose, generation, n, *indices)

        def drawn(purpose: str) -> Individual:
            draws = [derived(purpose, k) for k in range(config.tournament_size)]
            return tournament(pool, draws).individual

        mutation = Gene(self._birth(generation, n), derived("genome"), self.sigma(generation))
        parent = drawn("parent")
        if derived("cross") >= config.crossover_rate * _CHANCE:
            return parent, mutation, False
        mate = drawn("mate")
        if config.crossover == "union":
            crossed = parent | mate
        else:
            crossed = uniform(parent, mate, lambda birth: derived("gene", birth) % 2 == 0)
        if self._is_near(crossed):
            return crossed, mutation, False
        return parent, mutation, True

    def _is_near(self, individual: Individual) -> bool:
        """Return whether an individual can be hosted with one more mutation."""
        return len(individual ^ self.champion) < self._config.max_terms

    def _birth(self, generation: int, n: int) -> int:
        """Return the birth of child n of a generation; n = population_size is the ES step."""
        return generation * (self._config.population_size + 1) + n

    def _tested(
        self, members_G: Sequence[Parent], scores_P_G: Floats | None, fitness_G: Floats
    ) -> list[Parent]:
        """Return the members that were not lost, with scores if species go by them."""
        behaviour_G: Sequence[Sequence[float]] = [()] * len(members_G)
        if self.records_scores:
            assert scores_P_G is not None
            behaviour_G = scores_P_G.T.tolist()
        tested = zip(members_G, fitness_G.tolist(), behaviour_G, strict=True)
        return [
            member._replace(fitness=fitness, scores_P=tuple(scores_P))
            for member, fitness, scores_P in tested
            if math.isfinite(fitness)
        ]

    def _select(self, tested: Sequence[Parent]) -> None:
        """Make the fittest the champion; among equals the champion stays, or else the first."""
        best = max(tested, key=lambda parent: (parent.fitness, parent.individual == self.champion))
        self.champion = best.individual
        self._islands = [
            best_first([parent for parent in tested if parent.island == i])
            for i in range(self._config.num_islands)
        ]

    def _merge(self, generation: int, tested: Sequence[Parent]) -> None:
        """Merge all genes into the trunk (`es.merged`), from which all individuals restart."""
        new = {parent.mutation.seed for parent in tested if parent.mutation is not None}
        births = {gene.seed: gene.birth for parent in tested for gene in parent.individual}
        genomes_G = [Genome(terms(sorted(parent.individual))) for parent in tested]
        relative_G = _less_mean([parent.fitness for parent in tested])
        rate = self.learning_rate(generation) or 0.0
        all_terms = merged(genomes_G, relative_G, births.keys() - new, rate)
        self._trunk += [Gene(births[term.seed], term.seed, term.coefficient) for term in all_terms]
        self.champion = BASE
        self._islands = [[Parent(BASE, 0.0)] for _ in self._islands]

    def _es_step(self, generation: int, tested: Sequence[Parent]) -> list[Gene]:
        """Return an ES step over the new mutations, with their mean fitness as the baseline."""
        tried = [(p.mutation, p.fitness) for p in tested if p.mutation is not None]
        if not tried:
            return []
        genomes_G = [Genome(terms([gene])) for gene, _ in tried]
        relative_G = _less_mean([fitness for _, fitness in tried])
        birth = self._birth(generation, self._config.population_size)
        step = weighted_sum(genomes_G, relative_G, self.learning_rate(generation) or 0.0)
        return [Gene(birth, term.seed, term.coefficient) for term in step]


def _is_due(every: int, generation: int) -> bool:
    """Return whether an event of this period follows this generation; 0 means never."""
    return every > 0 and (generation + 1) % every == 0


def _less_mean(values_G: Sequence[float]) -> Floats:
    return np.array(values_G) - math.fsum(values_G) / len(values_G)
