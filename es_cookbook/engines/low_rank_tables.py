"""Low-rank genomes as tables: every genome's A and B factors, laid out for the population layers.

A genome's row holds all its terms side by side, and a fused group's factors are block-diagonal over
its members, so a forward pass needs two batched matmuls a group whatever the genomes. The last row
is zero: the centre. Twins (and any genomes that share a seed) share the making of their noise.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from es_cookbook.engines.population_layers import LowRankTable, PopulationModel
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.low_rank import LowRankSpace


def bytes_of_genome(model: PopulationModel, space: LowRankSpace, num_terms: int = 1) -> int:
    """Bytes of one genome's row over all tables."""
    total = 0
    for members in _members_of_groups(model, space):
        if members:
            group = model.groups[members[0][1]]
            ranks = space.rank * num_terms * len(members)
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
    num_terms = max((len(genome.terms) for genome in genomes_G), default=0)
    if num_terms == 0:
        return None

    def fill(members: list[tuple[str, int, int]]) -> LowRankTable | None:
        return _fill_group(model, space, genomes_G, members, num_terms, device) if members else None

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(fill, _members_of_groups(model, space)))


def _members_of_groups(
    model: PopulationModel, space: LowRankSpace
) -> list[list[tuple[str, int, int]]]:
    """For each group, (name, group, first output) of its perturbed members."""
    members: list[list[tuple[str, int, int]]] = [[] for _ in model.groups]
    for name, group, start in model.group_members():
        if name in space.shapes:
            members[group.index].append((name, group.index, start))
    return members


def _fill_group(
    model: PopulationModel,
    space: LowRankSpace,
    genomes_G: Sequence[Genome],
    members: list[tuple[str, int, int]],
    num_terms: int,
    device: torch.device,
) -> LowRankTable:
    group = model.groups[members[0][1]]
    num_genomes, rank = len(genomes_G), space.rank
    ranks = rank * num_terms * len(members)
    a_G_R_N = torch.zeros(num_genomes + 1, ranks, sum(group.sizes))
    b_G_K_R = torch.zeros(num_genomes + 1, group.in_features, ranks)
    seeds = sorted({term.seed for genome in genomes_G for term in genome.terms})
    # Term t of each genome: the place of its seed, and its scale; 0 where a genome has fewer terms.
    place_t_G = torch.zeros(num_terms, num_genomes, dtype=torch.int64)
    scale_t_G = torch.zeros(num_terms, num_genomes)
    place_of_seed = {seed: place for place, seed in enumerate(seeds)}
    for g, genome in enumerate(genomes_G):
        for t, term in enumerate(genome.terms):
            place_t_G[t, g] = place_of_seed[term.seed]
            scale_t_G[t, g] = float(space.scale(term.coefficient))
    for m, (name, _, start) in enumerate(members):
        factors_S = [space.factors(name, seed) for seed in seeds]
        a_S, b_S = (torch.from_numpy(np.stack(of_S)) for of_S in zip(*factors_S, strict=True))
        outputs = slice(start, start + a_S.shape[1])
        for t, (place_G, scale_G) in enumerate(zip(place_t_G, scale_t_G, strict=True)):
            first = (m * num_terms + t) * rank
            columns = slice(first, first + rank)
            a_G_R_N[:-1, columns, outputs] = a_S[place_G].mT * scale_G[:, None, None]
            b_G_K_R[:-1, :, columns] = b_S[place_G]
    dtype = group.weight.dtype
    return LowRankTable(a_G_R_N.to(device, dtype), b_G_K_R.to(device, dtype))
