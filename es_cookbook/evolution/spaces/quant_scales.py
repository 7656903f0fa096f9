"""Scales and zero points of a quantised checkpoint: native ES on what is not rounded to a grid.

The codes never change; a scale says how large a step of its group's grid is. ES at a quantised
model's scales moves one number in a group (a 32nd to a 128th of the weights) and leaves a
checkpoint of the same format, which whatever ran the base runs as it is.

Relative: a layer's scales differ by orders of magnitude, so what is perturbed is a factor on each,

    scale = float32(base scale * r),    r = 1 at the start,    r <- r + c * ε

with each product and sum rounded to float32, then rounded to the dtype that the checkpoint stores.
σ is thus the relative change of a whole group of weights, the same for all layers; r is linear in
the noise, not compounded, so the order of steps hardly matters and decay goes back to the base.

Zero points are whole numbers in every format. Their parameter is an offset δ in units of half the
codes' range, so that one σ fits both: at the codes' ends, σ of either moves a weight alike.

    zero = base zero + rint(δ * 2^(bits - 1)),    δ <- δ + c * ε

δ starts not at 0 but at a uniform phase of at most half a whole number, a function of the layer's
name, which changes nothing of the base: then a perturbation smaller than the grid moves that share
of the zero points by one, instead of none of them (Xu et al. 2026, arXiv:2602.03120, whose code
starts its residuals so).

The trap: a checkpoint's 16-bit scales have a grid too. A bfloat16 one moves by 2⁻⁸ of itself or
not at all, a float16 one by 2⁻¹¹; with a σ much below that, most genomes are the centre again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.noise.uniform import uniform_range
from es_cookbook.evolution.spaces.base import ParameterInfo, ParameterKind, SearchSpaceBuilder
from es_cookbook.evolution.spaces.factors import ReadAdapter
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch

_KINDS: Mapping[str, tuple[ParameterKind, ...]] = {
    "scales": ("scales",),
    "zeros": ("zeros",),
    "both": ("scales", "zeros"),
}


@chz.chz
class QuantScales(SearchSpaceBuilder):
    """Scales and zero points of a quantised checkpoint; its codes stay as they are."""

    which: Literal["scales", "zeros", "both"] = chz.field(
        default="scales", doc="what is perturbed: scales, zeros (zero points), or both"
    )

    @chz.validate
    def _which(self) -> None:
        if self.which not in _KINDS:
            raise ConfigError(
                f"search_space.which must be one of {', '.join(_KINDS)}, found {self.which!r}"
            )

    @property
    @override
    def kinds(self) -> tuple[ParameterKind, ...]:
        return _KINDS[self.which]

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "QuantScalesSpace":
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
        return QuantScalesSpace(shapes, self.noise, self.shares(shapes), bits=bits)


@dataclasses.dataclass(frozen=True)
class QuantScalesSpace(FullRankSpace):
    """Factors on scales and offsets of zero points, perturbed by dense noise.

    Attributes:
        bits: name of a zero points' parameter -> bits of its codes.
    """

    bits: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Factors of 1 and offsets that round to 0; the checkpoint's own numbers do not matter."""
        import torch

        del parameters
        started = {name: torch.ones(shape) for name, shape in self.shapes.items()}
        for name in self.bits:
            shape = self.shapes[name]
            phase = uniform_range(0, f"{name}.phase", 0, math.prod(shape)) - np.float32(0.5)
            offset = phase / np.float32(2 ** (self.bits[name] - 1))  # a power of two: exact
            started[name] = torch.from_numpy(offset.reshape(shape))
        return started
