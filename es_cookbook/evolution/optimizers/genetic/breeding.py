"""From the parents on their islands to the next population of the genetic algorithm.

An island keeps its elites and fills up with children: its species get their quotas, a tournament
finds the parents, they are crossed or not, and each child has one new mutation. All of it is a
function of the run seed, the generation and the parents. Who is too far from the champion to be
hosted does not breed, and a cross that would be so far is not made.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.optimizers.genetic.genealogy import (
    Gene,
    Individual,
    distance,
    uniform,
    union,
)
from es_cookbook.evolution.optimizers.genetic.selection import (
    DISTANCES,
    Parent,
    best_first,
    elites,
    quotas,
    species_of,
    tournament,
)

if TYPE_CHECKING:
    from es_cookbook.evolution.optimizers.genetic.genetic import Genetic

_CHANCE = 2.0**63
"""Above what `derive_seed` gives."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Breeding:
    """How a generation is bred.

    Attributes:
        config: the optimizer's.
        run_seed: everything random derives from it.
        generation: which.
        sigma: of its mutations.
        champion: the centre's genes; of genomes, only what differs from it is hosted.
    """

    config: "Genetic"
    run_seed: int
    generation: int
    sigma: float
    champion: Individual

    def population(self, islands: Sequence[Sequence[Parent]]) -> Population:
        """Everybody, island after island, each with its elites first.

        Args:
            islands: who may breed on each, best first.
        """
        config, apart = self.config, DISTANCES[self.config.species_by]
        members_G: list[Member] = []
        outgrown = num_species = 0
        for i, parents in enumerate(islands):
            near = [parent for parent in parents if self._is_near(parent.individual)]
            outgrown += len(parents) - len(near)
            species = species_of(
                near or [Parent(self.champion, 0.0)], apart, config.species_distance
            )
            first, last = (
                config.population_size * island // config.num_islands for island in (i, i + 1)
            )
            kept = elites(species, config.num_elites)
            children, crosses = self._children(first, last - first - len(kept), species)
            members_G += [Member(parent.individual, i) for parent in kept]
            members_G += [Member(individual | {gene}, i, gene) for individual, gene in children]
            outgrown += crosses
            num_species += len(species)
        return Population(self.generation, members_G, outgrown, num_species)

    def _children(
        self, first: int, number: int, species: Sequence[Sequence[Parent]]
    ) -> tuple[list[tuple[Individual, Gene]], int]:
        """Bred genes with a mutation each, and how many crosses had outgrown.

        Args:
            first: number that nobody of an earlier island has.
            number: how many.
            species: who breeds with whom.
        """
        config = self.config
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
            bred = self._drawn(pool, "parent", i).individual
            if self._derived("cross", i) < config.crossover_rate * _CHANCE:
                mate = self._drawn(pool, "mate", i).individual
                crossed = self._crossed(bred, mate, i)
                if self._is_near(crossed):
                    bred = crossed
                else:
                    outgrown += 1
            seed = self._derived("genome", i)
            birth = birth_of(config, self.generation, i)
            children += [(bred, Gene(birth, seed, sign * self.sigma)) for sign in signs]
        return children[:number], outgrown

    def _drawn(self, pool: Sequence[Parent], purpose: str, i: int) -> Parent:
        draws = range(self.config.tournament_size)
        return tournament(pool, [self._derived(purpose, i, k) for k in draws])

    def _crossed(self, a: Individual, b: Individual, i: int) -> Individual:
        if self.config.crossover == "union":
            return union(a, b)
        return uniform(a, b, lambda birth: self._derived("gene", i, birth) % 2 == 0)

    def _is_near(self, individual: Individual) -> bool:
        """Whether it can be hosted with a mutation more."""
        return distance(individual, self.champion) < self.config.max_terms

    def _derived(self, purpose: str, *indices: int) -> int:
        return derive_seed(self.run_seed, purpose, self.generation, *indices)


def birth_of(config: "Genetic", generation: int, i: int) -> int:
    """The birth of a generation's mating i; of its ES step if i is the population's size."""
    return generation * (config.population_size + 1) + i


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
