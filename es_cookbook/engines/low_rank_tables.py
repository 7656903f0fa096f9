"""Low-rank genomes as tables: every genome's A and B factors, laid out for the population layers.

A genome's row holds all its terms side by side, and a fused group's factors are block-diagonal over
its members, so a forward pass needs two batched matmuls a group whatever the genomes. The last row
is zero: the centre. Twins (and any genomes that share a seed) share the making of their noise.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

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
    ranks = space.rank * num_terms * len(members)
    a = torch.zeros(len(genomes_G) + 1, ranks, sum(group.sizes))
    b = torch.zeros(len(genomes_G) + 1, group.in_features, ranks)
    places: dict[int, list[tuple[int, int, float]]] = {}
    for g, genome in enumerate(genomes_G):
        for t, term in enumerate(genome.terms):
            places.setdefault(term.seed, []).append((g, t, term.coefficient))
    for m, (name, _, start) in enumerate(members):
        for seed, uses in places.items():
            a_factor, b_factor = (torch.from_numpy(factor) for factor in space.factors(name, seed))
            for g, t, coefficient in uses:
                first = (m * num_terms + t) * space.rank
                columns = slice(first, first + space.rank)
                scale = float(space.scale(coefficient))
                a[g, columns, start : start + a_factor.shape[0]] = a_factor.T * scale
                b[g, :, columns] = b_factor
    dtype = group.weight.dtype
    return LowRankTable(a.to(device, dtype), b.to(device, dtype))
