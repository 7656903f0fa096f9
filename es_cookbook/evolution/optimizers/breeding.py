"""Individuals, and who breeds: tournaments, elites, truncation, species that share children.

Tournaments use order alone, so how rewards were shaped into fitness does not matter. Species
(Stanley and Miikkulainen 2002) keep a niche alive while it is still worse than the best: similar
individuals compete with each other, and the number of a species' children follows from its *mean*,
not from its size. That is fitness sharing, over ranks, because centred fitness is negative for half
of them.

Individuals are similar in genes or in behaviour. Genes tell relatives from strangers, whatever they
do. Behaviour, as in novelty search (Lehman and Stanley 2011) but here scores problem by problem,
tells those who solve some problems from those who solve others, even one mutation apart.

Such et al. 2017 (arXiv:1712.06567): a network of any size is the list of the seeds that mutated its
ancestors. Here an individual is a set of genes: a gene is a seed and its coefficient, and an
individual's weights are the base plus its genes' terms in the order of their birth. That order is
the same in all individuals, so equal sets are equal weights, to the bit, however they were bred.
What two individuals share, how far apart they are and what a child of both may have is set
arithmetic. A genome, which an engine hosts as terms beside the centre's weights, is the difference
of two sets.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from es_cookbook.evolution.fitness import average_ranks
from es_cookbook.evolution.genome import Step, Term


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
"""At most one gene a birth."""
BASE: Individual = frozenset()
"""The base model, which everybody descends from."""


def terms(genes: Iterable[Gene]) -> tuple[Term, ...]:
    """Genes as terms, in the order given."""
    return tuple(Term(gene.seed, gene.coefficient) for gene in genes)


def difference(individual: Individual, centre: Individual) -> tuple[Term, ...]:
    """What a genome adds to the centre to be this individual, oldest first.

    What it has and the centre has not, and the negative of what the centre has and it has not.
    >>> difference(frozenset({Gene(0, 7, 0.5), Gene(2, 9, 0.5)}), frozenset({Gene(0, 7, 0.5)}))
    (Term(seed=9, coefficient=0.5),)
    """
    return tuple(
        Term(gene.seed, gene.coefficient if gene in individual else -gene.coefficient)
        for gene in sorted(individual ^ centre)
    )


def distance(a: Individual, b: Individual) -> int:
    """Genes in which two individuals differ: the terms of their `difference`.

    The measure of Stanley and Miikkulainen (2002), but not divided by the number of genes: a share
    would shrink as genealogies grow, though relatives stay as far apart.
    """
    return len(a ^ b)


def uniform(a: Individual, b: Individual, from_a: Callable[[int], bool]) -> Individual:
    """Every seed as `a` has it, or has it not, where the coin `from_a(birth)` says so; else as `b`.

    What both have is always kept.
    """
    return (a & b) | {gene for gene in a ^ b if (gene in a) == from_a(gene.birth)}


def in_order(trunk: Sequence[Gene], individual: Individual) -> list[Gene]:
    """All that makes an individual's weights from the base, as it is added: by birth.

    `trunk` is what all individuals have beside their own genes, by birth.
    """
    return sorted((*trunk, *individual), key=lambda gene: gene.birth)


def step_between(before: Sequence[Gene], after: Sequence[Gene]) -> Step:
    """How a centre that is exactly `before` becomes exactly `after`; both `in_order`.

    Where the one goes on from the other, what is new is added. Otherwise back to the base, which is
    exact, and all terms again: subtracting terms would leave their rounding behind.
    """
    if after[: len(before)] == before:
        return Step(terms(after[len(before) :]))
    return Step(terms(after), decay=1.0)


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
