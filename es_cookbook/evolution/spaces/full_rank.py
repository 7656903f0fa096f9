"""Dense noise for every selected parameter: ES as it is in the papers.

E = ε(seed, name), of the parameter's own shape. Applied exactly to the centre, a term is

    W <- W + s * E

with s = float32(coefficient), the product and the sum each rounded to float32 by itself. Every term
costs a pass of noise over the whole model, so an engine hosts few such genomes at once.

Ways of perturbing less of it at once:

- `density` below 1: only the elements of a fixed random mask are ever perturbed; all others keep
  every bit. Sparse MeZO (Liu et al. 2024, arXiv:2402.15751) does so with the smallest weights of
  each layer; here chance chooses them, so that nothing but a seed has to be known. There are fewer
  dimensions to search, but it saves nothing: the noise of all elements is made, and the mask costs
  one more pass whenever a weight gains its terms.
- `num_blocks` or `partitions` above 1: a seed perturbs one block of neighbouring parameters, or one
  part of all elements, chosen by chance in runs of 4,096 (see `Shares`). So a genome and a term of
  a step cost 1 / num_blocks or 1 / partitions of the noise. Weights and memory stay the same.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.evolution.genome import MAX_SEED, Term
from es_cookbook.evolution.noise import noise_range
from es_cookbook.evolution.noise.tensors import LANE_VALUES, Mask, Part
from es_cookbook.evolution.spaces.base import (
    PIECE,
    AddTerms,
    ParameterInfo,
    SearchSpace,
    SearchSpaceBuilder,
    pieces,
    refuse_quantised,
)
from es_cookbook.evolution.spaces.factors import ReadAdapter

if TYPE_CHECKING:
    import torch


@chz.chz
class DenseBuilder(SearchSpaceBuilder):
    """What spaces of dense noise have in common."""

    density: float = chz.field(
        default=1.0, doc="share of each parameter's elements, chosen by chance, that are perturbed"
    )
    mask_seed: int = chz.field(default=0, doc="of that choice, where density is below 1")

    @chz.validate
    def _mask(self) -> None:
        prefix = "search_space."
        check_range(self, "density", at_least=1 / LANE_VALUES, at_most=1, prefix=prefix)
        check_range(self, "mask_seed", at_least=0, at_most=MAX_SEED, prefix=prefix)

    def mask(self) -> Mask | None:
        """Of the elements that are perturbed; None for all."""
        threshold = round(self.density * LANE_VALUES)
        return Mask(self.mask_seed, threshold) if threshold < LANE_VALUES else None


@chz.chz
class FullRank(DenseBuilder):
    """Dense noise for every selected parameter."""

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "FullRankSpace":
        shapes = {p.name: p.shape for p in self.select(parameters)}
        refuse_quantised(self, parameters, shapes)
        shares = self.shares(shapes, divided=True)
        return FullRankSpace(shapes, self.noise, shares, self.mask())


class FullRankSpace(SearchSpace):
    """Any parameters, perturbed by noise of their own shape."""

    @override
    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """W <- W + change, for each term in order; elements outside the mask keep every bit."""
        own = self.shares.of(name, terms)
        present = [term for term in own if np.float32(term.coefficient) != 0]
        if not present:
            return
        buffer = np.empty(min(PIECE, weight.numel()), np.float32)
        partitions = self.shares.partitions_of(name)
        for start, stop, piece in pieces(weight, part or Part.whole(self.shapes[name])):
            inside = self.mask.range(name, start, stop) if self.mask else None
            for term in present:
                for first, last in partitions.runs(name, term.seed, start, stop):
                    change = self.change(name, term, first, last, out=buffer[: last - first])
                    run = slice(first - start, last - start)
                    where = True if inside is None else inside[run]
                    np.add(piece[run], change, out=piece[run], where=where)

    def change(
        self, name: str, term: Term, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """What one term adds to elements `start` ... `stop` - 1 in C order: s * E."""
        change = noise_range(term.seed, name, start, stop, self.noise, out)
        return np.multiply(change, np.float32(term.coefficient), out=change)

    @override
    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        from es_cookbook.evolution.noise.triton_kernels import add_dense_, device_terms

        names, kinds = self.shares.kinds(list(self.shapes), terms)
        there = [device_terms(self.shares.of(name, terms), device) for name in names]
        return lambda name, weight, part: add_dense_(
            *(weight, name, there[kinds[name]], self.noise, part, self.mask),
            self.shares.partitions_of(name),
        )
