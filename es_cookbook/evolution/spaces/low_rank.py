"""Low-rank noise for linear weights: the space in which a whole population samples at once.

For a weight W (out x in), A = ε(seed, name + ".A") (out x r), B = ε(seed, name + ".B") (in x r) and
E = A Bᵀ / √r (EGGROLL, Sarkar et al. 2025, arXiv:2511.16652). E's entries have unit variance,
for any rank. While sampling, E is never formed: the layer computes x Wᵀ + (c/√r) (x B) Aᵀ. An
antithetic twin is -c, which flips A's side only. For a weight that is stored (in x out), as GPT-2's
and some experts' are, A has its rows and B its columns all the same, so A is (in x r).

Applied exactly to the centre, a term is r rank-1 updates, k = 0 ... r - 1, s = float32(c / √r):

    W <- W + (s * A[:, k])[:, None] * B[:, k][None, :]

where each of the two products and the sum is rounded to float32 by itself. With σ by layer or
blocks, c is the weight's own share of the term (see `Shares`). Blocks save noise: a step makes just
the factors of a seed's own block, and so do a population's on the CPU. Their tables and slots keep
their size, with zeros where a genome has no part.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.spaces.base import (
    AddTerms,
    ParameterInfo,
    SearchSpace,
    SearchSpaceBuilder,
    as_array,
    linear_shapes,
    refuse_quantised,
)
from es_cookbook.evolution.spaces.factors import ReadAdapter, term_scales

if TYPE_CHECKING:
    import torch

_TERMS_AT_ONCE = 64
"""Terms whose factors are held at once; a weight is read and written once for so many."""


@chz.chz
class LowRank(SearchSpaceBuilder):
    """Perturbs the model's linear weights with low-rank noise (EGGROLL)."""

    hosts_offsets: ClassVar[bool] = False
    rank: int = chz.field(default=1, doc="rank of each term's perturbation of a weight")

    _rank = in_range("rank", at_least=1, at_most=2**16, prefix="search_space.")

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "LowRankSpace":
        """Build the space over the linear weights among the selected parameters."""
        shapes = linear_shapes(self, parameters)
        refuse_quantised(self, parameters, shapes)
        return LowRankSpace(shapes, self.noise, self.shares(shapes), rank=self.rank)


@dataclasses.dataclass(frozen=True)
class LowRankSpace(SearchSpace):
    """Linear weights (rows, columns), perturbed by A Bᵀ / √rank."""

    shapes: Mapping[str, tuple[int, int]]
    rank: int = dataclasses.field(kw_only=True)

    @override
    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """Add (s * A[:, k])[:, None] * B[:, k][None, :] to W, for each term and each k in order."""
        array = as_array(weight)
        part = part or Part.whole(self.shapes[name])
        own = self.shares.own(name, terms)
        scales_S = term_scales([term.coefficient for term in own], self.rank)
        present = np.flatnonzero(scales_S)
        for i in range(0, len(present), _TERMS_AT_ONCE):
            some = present[i : i + _TERMS_AT_ONCE]
            self._add_updates(name, array, scales_S[some], [own[s].seed for s in some], part)

    @override
    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        if self.makes_own_factors:
            return super().device_adder(terms, device)
        from es_cookbook.evolution.noise.triton_kernels import add_low_rank_, device_terms

        names, kinds = self.shares.kinds(list(self.shapes), terms)
        there = [device_terms(self.shares.own(name, terms), device, self.rank) for name in names]
        return lambda name, weight, part: add_low_rank_(
            weight, name, there[kinds[name]], self.rank, self.noise, part
        )

    def _add_updates(
        self,
        name: str,
        array: NDArray[np.float32],
        scales_S: NDArray[np.float32],
        seeds_S: Sequence[int],
        part: Part,
    ) -> None:
        from es_cookbook.evolution.noise.loops import add_outer_products_

        a_S, b_S = self.term_factors(name, seeds_S)
        # One rank-1 update after the other: (updates, rows) and (updates, columns).
        columns = np.multiply(a_S.swapaxes(1, 2), scales_S[:, None, None])
        columns = columns.reshape(-1, a_S.shape[1])[:, slice(*part.rows)]
        rows = b_S.swapaxes(1, 2).reshape(-1, b_S.shape[1])[:, slice(*part.columns)]
        add_outer_products_(array, columns, np.ascontiguousarray(rows))
