"""Low-rank genomes' terms as arrays, for engines that fill tables or slots with them.

Twins, and any genomes that share a seed, share the making of their noise.
"""

from collections.abc import Sequence

import torch

from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.low_rank import LowRankSpace


class GenomeTerms:
    """See the module's text.

    Args:
        genomes_G: a block of the population.
        space: what they perturb.

    Attributes:
        seeds: every seed once.
        place_t_G: `[t][g]` is the place in `seeds` of term t of genome g.
        scale_t_G: its scale; 0 where a genome has fewer terms.
    """

    def __init__(self, genomes_G: Sequence[Genome], space: LowRankSpace) -> None:
        self._space = space
        self.num_genomes = len(genomes_G)
        self.num_terms = max((len(genome.terms) for genome in genomes_G), default=0)
        self.seeds = sorted({term.seed for genome in genomes_G for term in genome.terms})
        self.place_t_G = torch.zeros(self.num_terms, self.num_genomes, dtype=torch.int64)
        self.scale_t_G = torch.zeros(self.num_terms, self.num_genomes)
        place_of_seed = {seed: place for place, seed in enumerate(self.seeds)}
        for g, genome in enumerate(genomes_G):
            for t, term in enumerate(genome.terms):
                self.place_t_G[t, g] = place_of_seed[term.seed]
                self.scale_t_G[t, g] = float(space.scale(term.coefficient))

    def factors_S(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A (seeds, out, rank) and B (seeds, in, rank) of one weight, for each of `seeds`."""
        a_S, b_S = self._space.factors_S(name, self.seeds)
        return torch.from_numpy(a_S), torch.from_numpy(b_S)
