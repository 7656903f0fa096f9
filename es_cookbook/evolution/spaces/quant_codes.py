"""Native quantised training: the codes of a quantised checkpoint are what evolves.

A code is a whole number 0 ... 2^bits - 1, kept exactly in float32. A term c · ε(seed) changes it by
a whole number, rounded at random as in QES (Quantized Evolution Strategies, Xu, Miikkulainen and
Qiu 2026, arXiv:2602.03120):

    code <- code + u,    u = sign(c) * floor(float32(|c|) * ε + v)

where v is uniform in (0, 1), a function of (seed, name, element) as ε is. So the mean of u is c · ε
however small c is, where the nearest whole number would be 0 at any c below about 0.1; σ = 0.005
moves 0.4 % of the codes by one. Antithetic twins share v, and move each code by opposite amounts.

Each term is rounded by itself, so a sum of steps is what they are one after the other. A code
beyond its range is taken to the end of it where it is used (`QuantisedWeight.moved`).

What an optimizer would add to weights is a thousandth of a code in a step. Plain ES here leaves
every such step to chance, with a noise of its own that no fitness asked for; the optimizer `qes`
adds up what was tried and rounds the sum (`es_cookbook.evolution.optimizers.qes`). It is what this
space is for.

Left out: QES leaves a code as it is where a change would lead out of its range; clipping differs
from that only for changes by more than one.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import noise_range
from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.noise.uniform import uniform_range
from es_cookbook.evolution.spaces.base import (
    AddTerms,
    ParameterInfo,
    ParameterKind,
    SearchSpaceBuilder,
)
from es_cookbook.evolution.spaces.factors import ReadAdapter
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch


@chz.chz
class QuantCodes(SearchSpaceBuilder):
    """The whole numbers of a quantised checkpoint; its scales stay as they are (QES)."""

    @property
    @override
    def kinds(self) -> tuple[ParameterKind, ...]:
        return ("codes",)

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "QuantCodesSpace":
        """Build the space over the selected layers' codes."""
        selected = self.select(parameters)
        shapes = {p.name: p.shape for p in selected}
        highest = 2 ** max(p.bits or 0 for p in selected) - 1
        return QuantCodesSpace(shapes, self.noise, self.shares(shapes), highest_code=highest)


@dataclasses.dataclass(frozen=True)
class QuantCodesSpace(FullRankSpace):
    """Whole numbers 0 ... `highest_code`, changed by whole numbers."""

    highest_code: int = dataclasses.field(kw_only=True)

    @override
    def change(
        self, name: str, term: Term, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Whole numbers u."""
        change = noise_range(term.seed, name, start, stop, self.noise, out)
        np.multiply(change, np.float32(abs(term.coefficient)), out=change)
        np.add(change, uniform_range(term.seed, f"{name}.rounding", start, stop), out=change)
        np.floor(change, out=change)
        return np.negative(change, out=change) if term.coefficient < 0 else change

    @override
    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        """Made on the CPU and sent, bit for bit the same."""
        del device

        def add(name: str, weight: "torch.Tensor", part: Part | None) -> None:
            there = weight.cpu().contiguous()
            self.add_terms_(name, there, terms, part)
            weight.copy_(there)

        return add
