"""Search spaces of quantised checkpoints: scales and zero points, or codes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import noise_range, uniform_range
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder
from es_cookbook.evolution.spaces.factors import ReadAdapter
from es_cookbook.evolution.spaces.full_rank import DenseSpace, FullRankSpace

if TYPE_CHECKING:
    import torch


@chz.chz
class _OfQuantised(SearchSpaceBuilder):
    """A space over what quantised weights consist of."""

    @override
    def select(self, parameters: Sequence[ParameterInfo]) -> list[ParameterInfo]:
        if not any(p.kind == "scales" for p in parameters):
            raise ConfigError(
                f"search_space: {type(self).__name__} moves what a quantised checkpoint stores, "
                "and this model has no weight quantised to whole numbers; accepted are GPTQ, AWQ "
                "and compressed-tensors checkpoints of integers, or another space (adapter, and "
                "over weights that are not quantised low_rank and full_rank)"
            )
        return super().select(parameters)


@chz.chz
class QuantScales(_OfQuantised):
    """Scales and zero points of a quantised checkpoint; its codes stay as they are.

    The codes never change; a scale says how large a step of its group's grid is. ES at a quantised
    model's scales moves one number in a group (a 32nd to a 128th of the weights) and leaves a
    checkpoint of the same format, which runs wherever the base does.

    Relative: a layer's scales differ by orders of magnitude, so the parameter is a factor on
    each,

        scale = float32(base scale * r),    r = 1 at the start,    r <- r + c * ε

    with each product and sum rounded to float32, then rounded to the dtype that the checkpoint
    stores. σ is thus the relative change of a whole group of weights, the same for all layers; r is
    linear in the noise, not compounded, so the order of steps hardly matters and decay goes back to
    the base.

    Zero points are whole numbers in every format. Their parameter is an offset δ in units of half
    the codes' range, so that one σ fits both: at the codes' ends, σ of either moves a weight alike.

        zero = base zero + rint(δ * 2^(bits - 1)),    δ <- δ + c * ε

    δ starts not at 0 but at a uniform phase of at most half a whole number, a function of the
    layer's name, which changes nothing of the base: then a perturbation smaller than the grid moves
    that share of the zero points by one, instead of none of them (Xu et al. 2026, arXiv:2602.03120,
    whose code starts its residuals so).

    The trap: a checkpoint's 16-bit scales have a grid too. A bfloat16 one moves by 2⁻⁸ of itself or
    not at all, a float16 one by 2⁻¹¹; with a σ much below that, most genomes are the centre again.
    """

    which: Literal["scales", "zeros", "both"] = chz.field(
        default="scales", doc="what is perturbed: scales, zeros (zero points), or both"
    )

    @property
    @override
    def kinds(self) -> tuple[str, ...]:
        return ("scales", "zeros") if self.which == "both" else (self.which,)

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "_QuantScalesSpace":
        """Build the space over the selected layers' scales, zero points, or both."""
        there = {parameter.kind for parameter in parameters}
        if "scales" in there and "zeros" in set(self.kinds) - there:
            raise ConfigError(
                f"search_space.which={self.which}: the checkpoint is symmetric and has no zero "
                "points; accepted here is scales"
            )
        selected = self.select(parameters)
        shapes = {p.name: p.shape for p in selected}
        bits = {p.name: p.bits for p in selected if p.kind == "zeros" and p.bits is not None}
        shares = self.shares(shapes, divided=True)
        return _QuantScalesSpace(shapes, self.noise, shares, bits=bits)


@dataclasses.dataclass(frozen=True)
class _QuantScalesSpace(FullRankSpace):
    """Factors on scales and offsets of zero points, perturbed by dense noise.

    Attributes:
        bits: name of a zero points' parameter -> bits of its codes.
    """

    bits: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return factors of 1 and offsets that round to 0; the checkpoint's do not matter."""
        import torch

        started = {name: torch.ones(shape) for name, shape in self.shapes.items()}
        for name in self.bits:
            shape = self.shapes[name]
            phase = uniform_range(0, f"{name}.phase", 0, math.prod(shape)) - np.float32(0.5)
            offset = phase / np.float32(2 ** (self.bits[name] - 1))  # a power of two: exact
            started[name] = torch.from_numpy(offset.reshape(shape))
        return started


@chz.chz
class QuantCodes(_OfQuantised):
    """The whole numbers of a quantised checkpoint; its scales stay as they are (QES).

    This is native quantised training. A code is a whole number 0 ... 2^bits - 1, kept exactly in
    float32. A term c · ε(seed) changes it by a whole number, rounded at random as in QES (Quantized
    Evolution Strategies, Xu, Miikkulainen and Qiu 2026, arXiv:2602.03120):

        code <- code + u,    u = sign(c) * floor(float32(|c|) * ε + v)

    where v is uniform in (0, 1), a function of (seed, name, element) as ε is. So the mean of u is c
    · ε however small c is, where the nearest whole number would be 0 at any c below about 0.1; σ =
    0.005 moves 0.4 % of the codes by one. Antithetic twins share v, and move each code by opposite
    amounts.

    Each term is rounded by itself, so a sum of steps is what they are one after the other. A code
    beyond its range is taken to the end of it where it is used (`QuantisedWeight.moved`).

    What an optimizer would add to weights is a thousandth of a code in a step. Plain ES here leaves
    every such step to chance, which adds noise that does not depend on fitness; the optimizer
    `qes` adds up what was tried and rounds the sum (`es_cookbook.plugins.quantised.qes`). It is
    what this space is for.

    Left out: QES leaves a code as it is where a change would lead out of its range; clipping
    differs from that only for changes by more than one.
    """

    hosts_offsets: ClassVar[bool] = False

    @property
    @override
    def kinds(self) -> tuple[str, ...]:
        return ("codes",)

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "QuantCodesSpace":
        """Build the space over the selected layers' codes."""
        selected = self.select(parameters)
        shapes = {p.name: p.shape for p in selected}
        highest = 2 ** max(p.bits or 0 for p in selected) - 1
        shares = self.shares(shapes, divided=True)
        return QuantCodesSpace(shapes, self.noise, shares, highest_code=highest)


@dataclasses.dataclass(frozen=True)
class QuantCodesSpace(DenseSpace):
    """Whole numbers 0 ... `highest_code`, changed by whole numbers."""

    highest_code: int = dataclasses.field(kw_only=True)

    @override
    def change(
        self, name: str, term: Term, start: int, stop: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        change = noise_range(term.seed, name, start, stop, self.noise, out)
        # u = sign(c) · floor(float32(|c|) · ε + v)
        np.multiply(change, np.float32(abs(term.coefficient)), out=change)
        np.add(change, uniform_range(term.seed, f"{name}.rounding", start, stop), out=change)
        np.floor(change, out=change)
        return np.negative(change, out=change) if term.coefficient < 0 else change
