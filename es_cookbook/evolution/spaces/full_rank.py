"""Dense noise for every selected parameter: ES as it is in the papers.

E = ε(seed, name), of the parameter's own shape. Applied exactly to the centre, a term is

    W <- W + s * E

with s = float32(coefficient), the product and the sum each rounded to float32 by itself. Every term
costs a pass of noise over the whole model, so an engine hosts few such genomes at once.

With `partitions` above 1, a seed perturbs one part of all elements, chosen at random in runs of
4,096 (see `Shares`). A genome and a term of a step then cost 1 / partitions of the noise. Weights
and memory stay the same.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import Part, noise_range
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
class FullRank(SearchSpaceBuilder):
    """Perturbs the selected parameters with dense noise."""

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "FullRankSpace":
        shapes = {p.name: p.shape for p in self.select(parameters)}
        refuse_quantised(self, parameters, shapes)
        return FullRankSpace(shapes, self.noise, self.shares(shapes, divided=True))


class DenseSpace(SearchSpace):
    """Any parameters, each element changed by a function of the noise (`change`)."""

    @abstractmethod
    def change(
        self, name: str, term: Term, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Return one term's addition to elements `start` ... `stop` - 1 in C order."""

    @override
    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """Add `change` to W, for each term in order."""
        own = self.shares.own(name, terms)
        present = [term for term in own if np.float32(term.coefficient) != 0]
        if not present:
            return
        buffer = np.empty(min(PIECE, weight.numel()), np.float32)
        partitions = self.shares.partitions_of(name)
        for start, stop, piece in pieces(weight, part or Part.whole(self.shapes[name])):
            for term in present:
                for first, last in partitions.runs(name, term.seed, start, stop):
                    change = self.change(name, term, first, last, out=buffer[: last - first])
                    run = slice(first - start, last - start)
                    piece[run] += change


class FullRankSpace(DenseSpace):
    """Any parameters, perturbed by noise of their own shape: s * E."""

    @override
    def change(
        self, name: str, term: Term, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        change = noise_range(term.seed, name, start, stop, self.noise, out)
        return np.multiply(change, np.float32(term.coefficient), out=change)

    @override
    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        from es_cookbook.evolution.noise.triton_kernels import add_dense_, device_terms

        names, kinds = self.shares.kinds(list(self.shapes), terms)
        there = [device_terms(self.shares.own(name, terms), device) for name in names]
        return lambda name, weight, part: add_dense_(
            *(weight, name, there[kinds[name]], self.noise, part), self.shares.partitions_of(name)
        )
