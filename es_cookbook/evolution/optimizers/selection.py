"""Who breeds: tournaments, elites, truncation, and species that share what they may have.

Tournaments look at order alone, so it does not matter how rewards were shaped into fitness. Species
(Stanley and Miikkulainen 2002) keep a niche alive while it is still worse than the best: similar
individuals compete with each other, and a species has as many children as its *mean* says, however
many members it has. That is fitness sharing; over ranks instead of fitness, because centred fitness
is negative for half of them.

Left out: distance by behaviour (rewards problem by problem), which an optimizer is not told.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from es_cookbook.evolution.optimizers.genealogy import Individual, distance


@dataclasses.dataclass(frozen=True, slots=True)
class Parent:
    """Someone who may breed.

    Attributes:
        individual: its genes.
        fitness: finite; of the generation that it was tried in.
    """

    individual: Individual
    fitness: float


def best_first(parents: Sequence[Parent]) -> list[Parent]:
    """By fitness; equals stay in their order."""
    return sorted(parents, key=lambda parent: -parent.fitness)


def tournament(parents: Sequence[Parent], draws: Sequence[int]) -> Parent:
    """The fittest of those drawn, and of equals the one drawn first.

    Args:
        parents: to draw from.
        draws: random integers from 0 on, far larger than the number of parents.
    """
    return max((parents[draw % len(parents)] for draw in draws), key=lambda parent: parent.fitness)


def species_of(parents: Sequence[Parent], threshold: int | None) -> list[list[Parent]]:
    """Clusters of relatives: each joins the first species whose best member is near enough.

    Args:
        parents: best first.
        threshold: most genes by which a member differs from its species' best; None for one
            species.

    Returns:
        Species, the one with the best member first, and each with its best member first.
    """
    if threshold is None:
        return [list(parents)]
    species: list[list[Parent]] = []
    for parent in parents:
        for members in species:
            if distance(parent.individual, members[0].individual) <= threshold:
                members.append(parent)
                break
        else:
            species.append([parent])
    return species


def elites(species: Sequence[Sequence[Parent]], number: int) -> list[Parent]:
    """The best of each species, then the second best of each, and so on, each time best first."""
    places = [(place, -p.fitness) for members in species for place, p in enumerate(members)]
    flat = [parent for members in species for parent in members]
    order = sorted(range(len(flat)), key=places.__getitem__)
    return [flat[i] for i in order[:number]]


def quotas(species: Sequence[Sequence[Parent]], number: int) -> list[int]:
    """How many children each species has: in proportion to its mean rank, the worst having rank 1.

    >>> one, other = [Parent(frozenset(), f) for f in (1.0, 1.0)], [Parent(frozenset(), 4.0)]
    >>> quotas([other, one], 9)
    [6, 3]
    """
    fitness = [parent.fitness for members in species for parent in members]
    ordered = np.sort(fitness)
    means: list[float] = []
    for members in species:
        own = [parent.fitness for parent in members]
        below = np.searchsorted(ordered, own, side="left")
        through = np.searchsorted(ordered, own, side="right")
        means.append(float(((below + 1 + through) / 2).mean()))
    shares = [number * mean / sum(means) for mean in means]
    counts = [int(share) for share in shares]
    # What is left over goes to the largest remainders.
    by_remainder = sorted(range(len(shares)), key=lambda s: counts[s] - shares[s])
    for s in by_remainder[: number - sum(counts)]:
        counts[s] += 1
    return counts
