"""Low-rank noise for linear weights: the space in which a whole population samples at once.

For a weight W (out x in), A = ε(seed, name + ".A") (out x r), B = ε(seed, name + ".B") (in x r) and
E = A Bᵀ / √r (EGGROLL, Sarkar et al. 2025, arXiv:2511.16652). E's entries have unit variance,
whatever the rank. While sampling, E is never formed: the layer computes x Wᵀ + (c/√r) (x B) Aᵀ. An
antithetic twin is -c, which flips A's side only.

Applied exactly to the centre, a term is r rank-1 updates, k = 0 ... r - 1, s = float32(c / √r):

    W <- W + (s * A[:, k])[:, None] * B[:, k][None, :]

where each of the two products and the sum is rounded to float32 by itself.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.errors import ConfigError
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import NoiseKind, noise
from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.spaces.base import (
    AddTerms,
    ParameterInfo,
    SearchSpace,
    SearchSpaceBuilder,
    as_array,
    linear_shapes,
)

if TYPE_CHECKING:
    import torch

_PIECE = 2**15
"""Elements of a weight that are worked on at once: they and their product stay in the cache."""
_TERMS_AT_ONCE = 64
"""Terms whose factors are held at once; a weight is read and written once for so many."""


@chz.chz
class LowRank(SearchSpaceBuilder):
    """Low-rank noise for the model's linear weights (EGGROLL)."""

    rank: int = chz.field(default=1, doc="rank of each term's perturbation of a weight")

    @chz.validate
    def _rank(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"search_space.rank must be at least 1, found {self.rank}")

    def __call__(self, parameters: Sequence[ParameterInfo]) -> "LowRankSpace":
        """Build the space over the linear weights among the selected parameters."""
        shapes = linear_shapes(self, parameters)
        return LowRankSpace(shapes=shapes, rank=self.rank, noise=self.noise)


@dataclasses.dataclass(frozen=True)
class LowRankSpace(SearchSpace):
    """Linear weights, perturbed by A Bᵀ / √rank.

    Attributes:
        shapes: name -> (out, in), in the model's order.
        rank: r, the same for every weight.
        noise: distribution of the elements of A and B.
    """

    shapes: Mapping[str, tuple[int, int]]
    rank: int
    noise: NoiseKind = "gaussian"

    def factors(self, name: str, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A (out, rank) and B (in, rank) of one weight."""
        out_features, in_features = self.shapes[name]
        a = noise(seed, f"{name}.A", (out_features, self.rank), self.noise)
        b = noise(seed, f"{name}.B", (in_features, self.rank), self.noise)
        return a, b

    def scale(self, coefficient: float) -> np.float32:
        """The factor on A Bᵀ: coefficient / √rank, rounded once from float64 to float32."""
        return np.float32(coefficient / math.sqrt(self.rank))

    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """W <- W + (s * A[:, k])[:, None] * B[:, k][None, :], for each term and each k in order."""
        array = as_array(weight)
        part = part or Part.whole(self.shapes[name])
        present = [term for term in terms if self.scale(term.coefficient) != 0]
        for i in range(0, len(present), _TERMS_AT_ONCE):
            self._add_updates(name, array, present[i : i + _TERMS_AT_ONCE], part)

    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        """See `SearchSpace.device_adder`."""
        from es_cookbook.evolution.noise.triton_kernels import add_low_rank_, low_rank_terms

        there = low_rank_terms(terms, self.rank, device)
        return lambda name, weight, part: add_low_rank_(weight, name, there, self.noise, part)

    def _add_updates(
        self, name: str, array: NDArray[np.float32], terms: Sequence[Term], part: Part
    ) -> None:
        scaled_columns: list[NDArray[np.float32]] = []
        rows: list[NDArray[np.float32]] = []
        for term in terms:
            a, b = self.factors(name, term.seed)
            a, b = a[slice(*part.rows)], b[slice(*part.columns)]
            scaled_columns.extend(np.multiply(a.T, self.scale(term.coefficient))[:, :, None])
            rows.extend(np.ascontiguousarray(b.T)[:, None, :])
        height = max(1, _PIECE // array.shape[1])
        buffer = np.empty((min(height, array.shape[0]), array.shape[1]), np.float32)
        for top in range(0, array.shape[0], height):
            piece = array[top : top + height]
            product = buffer[: len(piece)]
            for column, row in zip(scaled_columns, rows, strict=True):
                np.multiply(column[top : top + height], row, out=product)
                np.add(piece, product, out=piece)
