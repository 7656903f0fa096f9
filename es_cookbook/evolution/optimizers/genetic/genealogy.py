"""An individual of the genetic algorithm: a set of genes, each one mutation that it inherited.

Such et al. 2017 (arXiv:1712.06567): a network of any size is the list of the seeds that mutated its
ancestors. Here a gene is a seed and its coefficient, and an individual's weights are the base plus
its genes' terms in the order of their birth. That order is the same in all individuals, so equal
sets are equal weights, to the bit, however they were bred.

What two individuals share, how far apart they are and what a child of both may have is set
arithmetic. A genome, which an engine hosts as terms beside the centre's weights, is the difference
of two sets.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

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
