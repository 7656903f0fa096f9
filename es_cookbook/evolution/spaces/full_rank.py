"""Dense noise for every selected parameter: ES as it is in the papers.

E = ε(seed, name), of the parameter's own shape. Applied exactly to the centre, a term is

    W <- W + s * E

with s = float32(coefficient), the product and the sum each rounded to float32 by itself. Every term
costs a pass of noise over the whole model, so an engine hosts few such genomes at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import NoiseKind, noise_range
from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.spaces.base import (
    AddTerms,
    ParameterInfo,
    SearchSpace,
    SearchSpaceBuilder,
    as_array,
    refuse_quantised,
)

if TYPE_CHECKING:
    import torch

_PIECE = 2**15
"""Elements of a parameter that gain all their terms before the next ones do: they stay in cache."""


@chz.chz
class FullRank(SearchSpaceBuilder):
    """Dense noise for every selected parameter."""

    def __call__(self, parameters: Sequence[ParameterInfo]) -> "FullRankSpace":
        """Build the space over all selected parameters."""
        shapes = {p.name: p.shape for p in self.select(parameters)}
        refuse_quantised(self, parameters, shapes)
        return FullRankSpace(shapes=shapes, noise=self.noise)


@dataclasses.dataclass(frozen=True)
class FullRankSpace(SearchSpace):
    """Any parameters, perturbed by noise of their own shape.

    Attributes:
        shapes: name -> shape, in the model's order.
        noise: distribution of the noise.
    """

    shapes: Mapping[str, tuple[int, ...]]
    noise: NoiseKind = "gaussian"

    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """W <- W + s * E, for each term in order."""
        flat = as_array(weight).reshape(-1)
        scaled = [(np.float32(term.coefficient), term.seed) for term in terms]
        present = [(scale, seed) for scale, seed in scaled if scale != 0]
        buffer = np.empty(min(_PIECE, flat.size), np.float32)
        done = 0
        for span in (part or Part.whole(self.shapes[name])).spans():
            for start in span[::_PIECE]:
                stop = min(start + _PIECE, span.stop)
                piece = flat[done : done + stop - start]
                product = buffer[: piece.size]
                for scale, seed in present:
                    noise_range(seed, name, start, stop, self.noise, out=product)
                    np.multiply(product, scale, out=product)
                    np.add(piece, product, out=piece)
                done += piece.size

    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        """See `SearchSpace.device_adder`."""
        from es_cookbook.evolution.noise.triton_kernels import add_dense_, dense_terms

        there = dense_terms(terms, device)
        return lambda name, weight, part: add_dense_(weight, name, there, self.noise, part)
