"""Low-rank genomes and adapters as tables: every genome's factors, laid out for population layers.

A genome's row holds all its factors side by side, and a fused group's factors are block-diagonal
over its members, so a forward pass needs two batched matmuls a group whatever the genomes. The last
row is zero: for low-rank genomes, the centre; for adapters, which have the centre in the row before
it, the base.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from es_cookbook.engines.genome_terms import GenomeFactors, Slots
from es_cookbook.engines.torch.forward.experts import ExpertGroup
from es_cookbook.engines.torch.forward.population_layers import (
    LinearGroup,
    LowRankTable,
    PopulationModel,
)
from es_cookbook.evolution.centre import Centre, for_each, noise_device
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import SearchSpace

_REGISTER = 4
"""Numbers of a shortest vector register: what begins at a multiple of it is aligned."""

Tables: TypeAlias = list[LowRankTable | None]
"""One a linear group; None for a group that the space leaves out."""


class GenomeTables:
    """Makes the tables of a block of genomes.

    Args:
        model: hosts them.
        space: a low-rank one, or one of adapters.
    """

    def __init__(
        self, model: PopulationModel, space: SearchSpace, centre: Centre, num_threads: int
    ) -> None:
        self._space = space
        self._centre = centre
        rank = space.rank if space.adapter is None else space.adapter.lora.rank
        assert rank is not None, "dense genomes need models of their own"
        self._rank = rank
        self._num_threads = num_threads
        self._device = noise_device(model.groups[0].weight.device)
        self._num_groups = len(model.groups)
        members: dict[int, list[tuple[str, int]]] = {}
        for name, group, start in model.group_members():
            if name in space.weights:
                members.setdefault(group.index, []).append((name, start))
        self._groups = [(model.groups[index], of_group) for index, of_group in members.items()]

    def fill(self, genomes_G: Sequence[Genome]) -> Tables | None:
        """Make the tables of these genomes, or None where all of them would be zero."""
        if self._space.adapter is not None:
            genomes_G = [*genomes_G, Genome()]
        factors = GenomeFactors(genomes_G, self._space, self._device, self._centre)
        return self._fill(factors) if factors.num_ranks else None

    def bytes_of_genome(self) -> int:
        """Bytes of the row of a genome (a low-rank one: with one term), over all tables."""
        return sum(
            elements_of_row(group, self._rank, len(members)) * group.dtype.itemsize
            for group, members in self._groups
        )

    def _fill(self, factors: GenomeFactors) -> Tables:
        """Tables of zeros, one row more than there are genomes, and the factors in them."""
        tables: Tables = [None] * self._num_groups
        num_rows, rank = factors.num_genomes + 1, factors.num_ranks

        def write(
            name: str, transposed: bool, a_G_R_N: torch.Tensor, b_G_N_R: torch.Tensor
        ) -> None:
            slots = Slots(name, b_G_N_R.mT, a_G_R_N.mT)
            # A stored (in, out) weight's rows are inputs; an adapter's A reads them in any case.
            factors.write(slots.mT if transposed and self._space.adapter is None else slots)

        def fill(perturbed: tuple[LinearGroup | ExpertGroup, list[tuple[str, int]]]) -> None:
            group, members = perturbed
            a_sizes, b_sizes = _row_shapes(group, rank, len(members))
            dtype, device = group.dtype, self._device
            a_G = torch.zeros(num_rows, *a_sizes, dtype=dtype, device=device)
            b_G = torch.zeros(num_rows, *b_sizes, dtype=dtype, device=device).mT
            columns_R: list[tuple[int, int]] = []
            for m, (name, place) in enumerate(members):
                if isinstance(group, ExpertGroup):
                    write(name, group.transposed, a_G[:, place], b_G[:, place])
                    continue
                columns = slice(m * rank, (m + 1) * rank)
                size = group.sizes[group.offsets.index(place)]
                columns_R += [(place, place + size)] * rank
                a_G_R_N = a_G[:, columns, place : place + size]
                write(name, group.transposed, a_G_R_N, b_G[:, :, columns])
            where = np.array(columns_R, dtype=np.int64).reshape(-1, 2)
            a_G, b_G = (each.to(group.weight.device, group.dtype) for each in (a_G, b_G))
            tables[group.index] = LowRankTable(a_G, b_G, where)

        for_each(fill, self._groups, self._num_threads)
        factors.finish()
        return tables


def elements_of_row(group: LinearGroup | ExpertGroup, rank: int, num_members: int) -> int:
    """Size of one genome's factors of this rank, for so many perturbed layers of a group."""
    return sum(map(math.prod, _row_shapes(group, rank, num_members)))


def _row_shapes(
    group: LinearGroup | ExpertGroup, rank: int, num_members: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B of one genome, as they are in memory; see `LowRankTable`."""
    if isinstance(group, ExpertGroup):
        experts, outs, ins = group.weight.shape
        return (experts, rank, outs), (experts, rank, ins)
    ranks = _padded(rank * num_members)
    return (ranks, _padded(sum(group.sizes))), (ranks, group.in_features)


def _padded(size: int) -> int:
    """How long a table makes ranks or outputs of this number, so that bits depend on no position.

    Sizes that no kernel of the BLAS cuts into registers stay as they are.
    """
    return size if size <= _REGISTER else -(-size // _REGISTER) * _REGISTER
