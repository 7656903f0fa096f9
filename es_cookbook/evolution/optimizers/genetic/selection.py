"""Who breeds: tournaments, elites, truncation, and species that share what they may have.

Tournaments use order alone, so how rewards were shaped into fitness does not matter. Species
(Stanley and Miikkulainen 2002) keep a niche alive while it is still worse than the best: similar
individuals compete with each other, and the number of a species' children follows from its *mean*,
not from its size. That is fitness sharing, over ranks, because centred fitness is negative for half
of them.

Individuals are similar in genes or in behaviour. Genes tell relatives from strangers, whatever they
do. Behaviour, as in novelty search (Lehman and Stanley 2011) but here scores problem by problem,
tells those who solve some problems from those who solve others, even one mutation apart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from es_cookbook.evolution.fitness import average_ranks
from es_cookbook.evolution.optimizers.genetic.genealogy import Gene, Individual, distance


class Parent(NamedTuple):
    """Someone of a population, who may breed.

    Attributes:
        individual: its genes.
        fitness: of the generation that it was tried in; NaN before, and if it was lost.
        scores_P: its behaviour, on that generation's problems: NaN where it has none. Empty where
            nobody looks at it.
        island: where it was tried.
        mutation: what was new in it then; None for an elite.
    """

    individual: Individual
    fitness: float = math.nan
    scores_P: tuple[float, ...] = ()
    island: int = 0
    mutation: Gene | None = None


def genes_apart(a: Parent, b: Parent) -> float:
    """How far apart two are by their seeds: genes in which they differ, 0 on."""
    return distance(a.individual, b.individual)


def behaviour_apart(a: Parent, b: Parent) -> float:
    """How far apart two of a generation are by what they do: mean |difference| of rewards.

    The mean is over the problems on which both have a reward; infinity if there are none. Of
    rewards 0 and 1 it is the share of problems that one of them solves and the other does not.

    >>> behaviour_apart(Parent(frozenset(), 0.5, (1.0, 0.0)), Parent(frozenset(), 0.5, (0.5, 1.0)))
    0.75
    """
    pairs = zip(a.scores_P, b.scores_P, strict=True)
    gaps = [abs(one - other) for one, other in pairs if not math.isnan(one - other)]
    return math.fsum(gaps) / len(gaps) if gaps else math.inf


DISTANCES: Mapping[str, Callable[[Parent, Parent], float]] = {
    "seeds": genes_apart,
    "behaviour": behaviour_apart,
}
"""What species can go by."""


def best_first(parents: Sequence[Parent]) -> list[Parent]:
    """By fitness; equals stay in their order."""
    return sorted(parents, key=lambda parent: -parent.fitness)


def tournament(parents: Sequence[Parent], draws: Sequence[int]) -> Parent:
    """The fittest of those drawn, by integers far above their number; of equals the first."""
    return max((parents[draw % len(parents)] for draw in draws), key=lambda parent: parent.fitness)


def species_of(
    parents: Sequence[Parent], apart: Callable[[Parent, Parent], float], threshold: float | None
) -> list[list[Parent]]:
    """Clusters of the similar: each joins the first species whose best member is near enough.

    Near is at most `threshold` apart; None for one species. The parents are best first, and so are
    the species by their best members, and each species' members.
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
    of_species = [np.array([parent.fitness for parent in members]) for members in species]
    everybody = np.concatenate(of_species)
    means = [float((average_ranks(fitness, everybody) + 1).mean()) for fitness in of_species]
    shares = [number * mean / sum(means) for mean in means]
    counts = [int(share) for share in shares]
    # What is left over goes to the largest remainders.
    by_remainder = sorted(range(len(shares)), key=lambda s: counts[s] - shares[s])
    for s in by_remainder[: number - sum(counts)]:
        counts[s] += 1
    return counts


def parents_of(
    species: Sequence[Sequence[Parent]], number: int, truncation: float
) -> list[Sequence[Parent]]:
    """For each child, who may be its parents: the best `truncation`, rounded up, of a species."""
    return [
        members[: math.ceil(truncation * len(members))]
        for members, quota in zip(species, quotas(species, number), strict=True)
        for _ in range(quota)
    ]


def migrated(islands: Sequence[Sequence[Parent]]) -> list[list[Parent]]:
    """In a ring, each island's best also joins the next one, in place of the worst there.

    Islands are best first; whoever is alone on one stays.
    """
    if len(islands) == 1:
        return [list(parents) for parents in islands]
    return [
        best_first([*parents[: max(1, len(parents) - 1)], *islands[i - 1][:1]])
        for i, parents in enumerate(islands)
    ]
