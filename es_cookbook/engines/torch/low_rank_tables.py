"""Low-rank genomes and adapters as tables: every genome's factors, laid out for population layers.

A genome's row holds all its factors side by side, and a fused group's factors are block-diagonal
over its members, so a forward pass needs two batched matmuls a group whatever the genomes. The last
row is zero: for low-rank genomes, the centre; for adapters, which have the centre in the row before
it, the base.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from typing_extensions import override

from es_cookbook.engines.genome_terms import GenomeTerms
from es_cookbook.engines.torch.population_layers import (
    LinearGroup,
    LowRankTable,
    PopulationModel,
    padded,
)
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.devices import for_each, noise_device
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.evolution.spaces.factors import AdapterFactors

Tables: TypeAlias = list[LowRankTable | None]
"""One a linear group; None for a group that the space leaves out."""
_Fill: TypeAlias = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Writes one weight's factors: its name, a_G_R_N (rows, ranks, its outputs), b_G_K_R."""


class GenomeTables(ABC):
    """Makes the tables of a block of genomes.

    Args:
        model: hosts them.
        weights: names of the weights that genomes change, all of them linear.
        rank: of a genome's factors; a low-rank one's with one term.
        num_threads: that make them.

    Attributes:
        hosts_base: the base has a row too, after the centre's.
    """

    hosts_base = False

    def __init__(
        self, model: PopulationModel, weights: Sequence[str], rank: int, num_threads: int
    ) -> None:
        self._rank = rank
        self._num_threads = num_threads
        self._device = noise_device(model.groups[0].weight.device)
        self._num_groups = len(model.groups)
        members: dict[int, list[tuple[str, int]]] = {}
        chosen = set(weights)
        for name, group, start in model.group_members():
            if name in chosen:
                members.setdefault(group.index, []).append((name, start))
        self._groups = [(model.groups[index], of_group) for index, of_group in members.items()]

    @abstractmethod
    def fill(self, genomes_G: Sequence[Genome]) -> Tables | None:
        """Make the tables of these genomes, or None where all of them would be zero."""

    def bytes_of_genome(self) -> int:
        """Bytes of the row of a genome (a low-rank one: with one term), over all tables."""
        total = 0
        for group, members in self._groups:
            ranks = padded(self._rank * len(members))
            sizes = group.in_features + padded(sum(group.sizes))
            total += ranks * sizes * group.weight.element_size()
        return total

    def _fill(self, num_rows: int, rank: int, fill_weight: _Fill) -> Tables:
        """Tables of zeros with `num_rows` rows, each weight's factors written by `fill_weight`."""
        tables: Tables = [None] * self._num_groups

        def fill(perturbed: tuple[LinearGroup, list[tuple[str, int]]]) -> None:
            group, members = perturbed
            ranks = padded(rank * len(members))
            outs, ins = padded(sum(group.sizes)), group.in_features
            a_G_R_N = torch.zeros(num_rows, ranks, outs, device=self._device)
            b_G_K_R = torch.zeros(num_rows, ins, ranks, device=self._device)
            sizes = dict(zip(group.offsets, group.sizes, strict=True))
            for m, (name, start) in enumerate(members):
                columns = slice(m * rank, (m + 1) * rank)
                outputs = slice(start, start + sizes[start])
                fill_weight(name, a_G_R_N[:, columns, outputs], b_G_K_R[:, :, columns])
            weight = group.weight
            tables[group.index] = LowRankTable(a_G_R_N.to(weight), b_G_K_R.to(weight))

        for_each(fill, self._groups, self._num_threads)
        return tables


class LowRankTables(GenomeTables):
    """Of low-rank genomes: a genome's terms side by side."""

    def __init__(
        self, model: PopulationModel, space: SearchSpace, rank: int, num_threads: int
    ) -> None:
        super().__init__(model, list(space.shapes), rank, num_threads)
        self._space = space

    @override
    def fill(self, genomes_G: Sequence[Genome]) -> Tables | None:
        terms = GenomeTerms(genomes_G, self._space, self._device)
        if terms.num_ranks == 0:
            return None

        def fill_weight(name: str, a_G_R_N: torch.Tensor, b_G_K_R: torch.Tensor) -> None:
            terms.write(name, b_G_K_R.mT, a_G_R_N.mT)

        return self._fill(terms.num_genomes + 1, terms.num_ranks, fill_weight)


class AdapterTables(GenomeTables):
    """Of adapters: each genome's own factors, then the centre's, then none for the base."""

    hosts_base = True

    def __init__(
        self, model: PopulationModel, adapter: AdapterFactors, centre: Centre, num_threads: int
    ) -> None:
        super().__init__(model, list(adapter.targets), adapter.lora.rank, num_threads)
        self._adapter = adapter
        self._centre = centre

    @override
    def fill(self, genomes_G: Sequence[Genome]) -> Tables:
        rows = [*genomes_G, Genome()]

        def fill_weight(name: str, a_G_R_N: torch.Tensor, b_G_K_R: torch.Tensor) -> None:
            values_G = [functools.partial(self._centre.perturbed, genome) for genome in rows]
            for g, (a, b) in enumerate(self._adapter.factors(name, values_G)):
                b_G_K_R[g] = a.T
                a_G_R_N[g] = b.T * self._adapter.lora.scale

        return self._fill(len(rows) + 1, self._rank, fill_weight)


def tables_for(
    model: PopulationModel, space: SearchSpace, centre: Centre, num_threads: int
) -> GenomeTables | None:
    """How a space's genomes become tables; None for dense ones, which need models of their own."""
    if space.low_rank is not None:
        return LowRankTables(model, space, space.low_rank.rank, num_threads)
    if space.adapter is not None:
        return AdapterTables(model, space.adapter, centre, num_threads)
    return None
