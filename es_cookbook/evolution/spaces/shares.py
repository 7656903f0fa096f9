"""Each parameter's share of a term: σ by layer, and terms that change one block of the model only.

A term (seed, coefficient) means coefficient · E everywhere; with shares, parameter p has

    coefficient_p = coefficient * factor_p  if p is in group (seed mod number of groups), else none

a product in float64, which the space rounds to float32 once, as it rounds a coefficient. It is a
function of (seed, name) alone: twins share their group, so a twin is still the exact mirror, and a
step of recorded terms means the same wherever and whenever it is taken.

- Factors are σ by layer. A step is made of the same noise as genomes, so it moves p by factor_p
  too; since fitness answers to p's noise in proportion to factor_p, p's learning rate changes with
  factor_p². It is ES with the diagonal covariance σ² · diag(factor²).
- Groups are block-coordinate ES: MeZO-BCD (Park et al. 2025, arXiv:2501.19099) for differences of
  two, BAdam (Luo, Yu and Li 2024, arXiv:2404.02827) for gradients. There all of a step is one
  block's; here the seeds of one generation spread over all blocks, so each block is moved by about
  population / blocks genomes, and the variance that the other blocks' noise would add is gone.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from es_cookbook.evolution.genome import Term


@dataclasses.dataclass(frozen=True)
class Shares:
    """How terms are shared out over a space's parameters; all of them to all, if nothing is given.

    Attributes:
        factors: name -> factor on the coefficient, 0 for a parameter that no term changes; 1 for
            names that are not in it.
        groups: name -> 0 ... num_groups - 1; 0 for names that are not in it.
        num_groups: a term changes the parameters of group seed mod num_groups.
    """

    factors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    num_groups: int = 1

    def kind(self, name: str) -> tuple[float, int]:
        """Factor and group: parameters that have the same get the same of every term."""
        return self.factors.get(name, 1.0), self.groups.get(name, 0)

    def kinds(self, names: Sequence[str]) -> dict[tuple[float, int], str]:
        """One name of each kind."""
        return {self.kind(name): name for name in names}

    def of(self, name: str, terms: Sequence[Term]) -> Sequence[Term]:
        """The terms that change a parameter, in order, each with the coefficient it has there."""
        factor, group = self.kind(name)
        if factor == 1 and self.num_groups == 1:
            return terms  # Of a long history they are many.
        if factor == 0:
            return []
        return [
            Term(term.seed, term.coefficient * factor)
            for term in terms
            if term.seed % self.num_groups == group
        ]


def balanced_blocks(sizes: Sequence[int], num_blocks: int) -> list[int]:
    """Cut neighbours of these sizes into 1 ... len(sizes) blocks of about the same size.

    Block b ends where the sizes so far come nearest to (b + 1) / num_blocks of all, and has one at
    least. Returns the block of each, rising from 0 to num_blocks - 1.

    >>> balanced_blocks([5, 1, 1, 1, 1, 1], 2)
    [0, 1, 1, 1, 1, 1]
    """
    so_far = list(itertools.accumulate(sizes))
    blocks: list[int] = []
    for b in range(num_blocks - 1):
        # Enough are left over for the later blocks; all numbers are whole, so nothing is rounded.
        ends = range(len(blocks) + 1, len(sizes) - (num_blocks - 2 - b))
        goal = (b + 1) * so_far[-1]
        end = min(ends, key=lambda end: abs(num_blocks * so_far[end - 1] - goal))
        blocks += [b] * (end - len(blocks))
    return blocks + [num_blocks - 1] * (len(sizes) - len(blocks))
