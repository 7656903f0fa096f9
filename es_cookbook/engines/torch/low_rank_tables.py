"""Low-rank genomes and adapters as tables: every genome's factors, laid out for population layers.

A genome's row holds all its factors side by side, and a fused group's factors are block-diagonal
over its members, so a forward pass needs two batched matmuls a group whatever the genomes. The last
row is zero: for low-rank genomes, the centre; for adapters, which have the centre in the row before
it, the base.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

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
        weights, of_rank = space.shapes, space.low_rank
        if space.adapter is not None:
            weights, of_rank = space.adapter.targets, space.adapter.lora
        assert of_rank is not None, "dense genomes need models of their own"
        self._rank = of_rank.rank
        self._num_threads = num_threads
        self._device = noise_device(model.groups[0].weight.device)
        self._num_groups = len(model.groups)
        members: dict[int, list[tuple[str, int]]] = {}
        for name, group, start in model.group_members():
            if name in weights:
                members.setdefault(group.index, []).append((name, start))
        self._groups = [(model.groups[index], of_group) for index, of_group in members.items()]

    def fill(self, genomes_G: Sequence[Genome]) -> Tables | None:
        """Make the tables of these genomes, or None where all of them would be zero."""
        if self._space.adapter is not None:
            return self._fill_adapters([*genomes_G, Genome()], self._space.adapter)
        terms = GenomeTerms(genomes_G, self._space, self._device)
        if terms.num_ranks == 0:
            return None

        def fill_weight(name: str, a_G_R_N: torch.Tensor, b_G_K_R: torch.Tensor) -> None:
            terms.write(name, b_G_K_R.mT, a_G_R_N.mT)

        return self._fill(terms.num_genomes + 1, terms.num_ranks, fill_weight)

    def _fill_adapters(self, genomes_G: Sequence[Genome], adapter: AdapterFactors) -> Tables:
        values_G = [functools.partial(self._centre.perturbed, genome) for genome in genomes_G]

        def fill_weight(name: str, a_G_R_N: torch.Tensor, b_G_K_R: torch.Tensor) -> None:
            for g, (a, b) in enumerate(adapter.factors(name, values_G)):
                b_G_K_R[g] = a.T
                a_G_R_N[g] = b.T * adapter.lora.scale

        return self._fill(len(genomes_G) + 1, self._rank, fill_weight)

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
