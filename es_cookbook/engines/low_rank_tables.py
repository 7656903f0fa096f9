"""Low-rank genomes as tables: every genome's A and B factors, laid out for the population layers.

A genome's row holds all its terms side by side, and a fused group's factors are block-diagonal over
its members, so a forward pass needs two batched matmuls a group whatever the genomes. The last row
is zero: the centre. Twins (and any genomes that share a seed) share the making of their noise.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from es_cookbook.engines.population_layers import LinearGroup, LowRankTable, PopulationModel
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.low_rank import LowRankSpace


def bytes_of_genome(model: PopulationModel, space: LowRankSpace) -> int:
    """Bytes of the row of a genome with one term, over all tables."""
    total = 0
    for group, members in _perturbed_groups(model, space):
        ranks = space.rank * len(members)
        total += ranks * (group.in_features + sum(group.sizes)) * group.weight.element_size()
    return total


def fill_tables(
    model: PopulationModel,
    space: LowRankSpace,
    genomes_G: Sequence[Genome],
    device: torch.device,
    num_threads: int,
) -> list[LowRankTable | None] | None:
    """Make the tables of these genomes, one a linear group, or None if all of them are the centre.

    A group that the space leaves out has None for a table.
    """
    terms = _Terms(genomes_G, space)
    if terms.num_terms == 0:
        return None
    tables: list[LowRankTable | None] = [None] * len(model.groups)

    def fill(perturbed: tuple[LinearGroup, list[tuple[str, int]]]) -> None:
        group, members = perturbed
        tables[group.index] = _fill_group(space, terms, group, members, device)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(fill, _perturbed_groups(model, space)))
    return tables


def _perturbed_groups(
    model: PopulationModel, space: LowRankSpace
) -> list[tuple[LinearGroup, list[tuple[str, int]]]]:
    """Groups that the space perturbs, each with (name, first output) of its perturbed members."""
    members: dict[int, list[tuple[str, int]]] = {}
    for name, group, start in model.group_members():
        if name in space.shapes:
            members.setdefault(group.index, []).append((name, start))
    return [(model.groups[index], of_group) for index, of_group in members.items()]


class _Terms:
    """The genomes' terms as arrays: what all groups need to know of them.

    Attributes:
        seeds: every seed once.
        place_t_G: `[t][g]` is the place in `seeds` of term t of genome g.
        scale_t_G: its scale; 0 where a genome has fewer terms.
    """

    def __init__(self, genomes_G: Sequence[Genome], space: LowRankSpace) -> None:
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


def _fill_group(
    space: LowRankSpace,
    terms: _Terms,
    group: LinearGroup,
    members: list[tuple[str, int]],
    device: torch.device,
) -> LowRankTable:
    num_rows, rank = terms.num_genomes + 1, space.rank
    ranks = rank * terms.num_terms * len(members)
    a_G_R_N = torch.zeros(num_rows, ranks, sum(group.sizes))
    b_G_K_R = torch.zeros(num_rows, group.in_features, ranks)
    for m, (name, start) in enumerate(members):
        factors_S = [space.factors(name, seed) for seed in terms.seeds]
        a_S, b_S = (torch.from_numpy(np.stack(of_S)) for of_S in zip(*factors_S, strict=True))
        outputs = slice(start, start + a_S.shape[1])
        for t, (place_G, scale_G) in enumerate(zip(terms.place_t_G, terms.scale_t_G, strict=True)):
            first = (m * terms.num_terms + t) * rank
            columns = slice(first, first + rank)
            a_G_R_N[:-1, columns, outputs] = a_S[place_G].mT * scale_G[:, None, None]
            b_G_K_R[:-1, :, columns] = b_S[place_G]
    dtype = group.weight.dtype
    return LowRankTable(a_G_R_N.to(device, dtype), b_G_K_R.to(device, dtype))
