"""Native quantised training: the codes of a quantised checkpoint are what evolves.

A code is a whole number 0 ... 2^bits - 1, kept exactly in float32. A term c · ε(seed) changes it by
a whole number, rounded at random as in QES (Quantized Evolution Strategies, Xu, Miikkulainen and
Qiu 2026, arXiv:2602.03120):

    u = sign(c) * floor(float32(|c|) * ε + v),    code <- min(max(code + u, 0), 2^bits - 1)

where v is uniform in (0, 1), a function of (seed, name, element) as ε is. So the mean of u is c · ε
however small c is, where the nearest whole number would be 0 at any c below about 0.1; σ = 0.005
moves 0.4 % of the codes by one. Antithetic twins share v, and move each code by opposite amounts.

Each term is rounded and clipped by itself, in float32, so a sum of steps is what they are one after
the other. What an optimizer would add to weights is a thousandth of a code a step: plain ES leaves
rounding to chance, generation after generation; the optimizer `qes` rounds the accumulated step
(`es_cookbook.evolution.optimizers.qes`), and is what this space is for.

Left out: codes at the end of their range are clipped, where QES leaves them as they are; they
differ only for changes by more than one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import NoiseKind, noise_range
from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.noise.uniform import uniform_range
from es_cookbook.evolution.spaces.base import (
    AddTerms,
    ParameterInfo,
    SearchSpace,
    SearchSpaceBuilder,
    as_array,
    no_quantised_weight,
)

if TYPE_CHECKING:
    import torch

_PIECE = 2**15
"""Elements of a parameter that gain all their terms before the next ones do: they stay in cache."""


@chz.chz
class QuantCodes(SearchSpaceBuilder):
    """The whole numbers of a quantised checkpoint; its scales stay as they are (QES)."""

    def __call__(self, parameters: Sequence[ParameterInfo]) -> "QuantCodesSpace":
        """Build the space over the selected layers' codes."""
        if not any(parameter.kind == "codes" for parameter in parameters):
            raise no_quantised_weight(self)
        selected = self.select(parameters, ("codes",))
        return QuantCodesSpace(
            shapes={p.name: p.shape for p in selected},
            bits={p.name: p.bits for p in selected if p.bits is not None},
            noise=self.noise,
        )


@dataclasses.dataclass(frozen=True)
class QuantCodesSpace(SearchSpace):
    """Whole numbers in a range, changed by whole numbers.

    Attributes:
        shapes: name -> (out, in), in the model's order.
        bits: name -> bits of its codes.
        noise: distribution of ε.
    """

    shapes: Mapping[str, tuple[int, ...]]
    bits: Mapping[str, int]
    noise: NoiseKind = "gaussian"

    def change(self, name: str, term: Term, start: int, stop: int) -> NDArray[np.float32]:
        """U of one term, whole numbers, for elements `start` ... `stop` - 1 in C order."""
        size = np.float32(abs(term.coefficient))
        noise = noise_range(term.seed, name, start, stop, self.noise)
        np.multiply(noise, size, out=noise)
        np.add(noise, uniform_range(term.seed, f"{name}.rounding", start, stop), out=noise)
        np.floor(noise, out=noise)
        return np.negative(noise, out=noise) if term.coefficient < 0 else noise

    def clip_(self, name: str, codes: NDArray[np.float32]) -> None:
        """Take codes to the nearest in their range, in place."""
        np.clip(codes, np.float32(0), np.float32(2 ** self.bits[name] - 1), out=codes)

    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """Code <- clip(code + u), for each term in order."""
        flat = as_array(weight).reshape(-1)
        present = [term for term in terms if np.float32(term.coefficient) != 0]
        done = 0
        for span in (part or Part.whole(self.shapes[name])).spans():
            for start in span[::_PIECE]:
                stop = min(start + _PIECE, span.stop)
                piece = flat[done : done + stop - start]
                for term in present:
                    np.add(piece, self.change(name, term, start, stop), out=piece)
                    self.clip_(name, piece)
                done += piece.size

    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        """See `SearchSpace.device_adder`; made on the CPU and sent, bit for bit the same."""
        del device

        def add(name: str, weight: "torch.Tensor", part: Part | None) -> None:
            there = weight.cpu().contiguous()
            self.add_terms_(name, there, terms, part)
            weight.copy_(there)

        return add
