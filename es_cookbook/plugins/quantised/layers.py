"""Quantised linear weights in memory: codes, scales and zero points.

    W[o, i] = (code[o, i] - zero[o, g(i)]) · scale[o, g(i)]

Codes are integers of a few bits, 0 ... 2^bits - 1, or floats of 8 bits without zero points. A scale
is shared by a group g of an output's inputs, or by all of them (GPTQ, Frantar et al. 2022,
arXiv:2210.17323; AWQ, arXiv:2306.00978); those of blocks (DeepSeek-V3, arXiv:2412.19437) are
repeated for each output. Integers without zero points have all in the middle, 2^(bits - 1). The
weight is computed in float32, where the difference is exact and the product is rounded once, and
then cast to the dtype that samples: it is always derived, never the truth. Activations are not
rounded: where a checkpoint asks for it (W8A8), vLLM does, and the model computed here is that of
these weights.

What search spaces move are the parameters of a `CodesAndScales` of integers; `moved` says what
their values make of it. The result is a quantised weight again, with scales in the dtype that the
checkpoint stores and integers in its range: every genome is a checkpoint that could be written as
it is. `files` reads and writes them.

Left out: moving floats, whose steps differ in size.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from typing_extensions import override

from es_cookbook.checkpoints.quantised import QuantisedWeight

Kind: TypeAlias = Literal["codes", "scales", "zeros"]
KINDS: tuple[Kind, ...] = ("scales", "zeros", "codes")
"""Kinds, in the order in which a layer's parameters are listed."""


@dataclasses.dataclass(frozen=True)
class CodesAndScales(QuantisedWeight):
    """A quantised weight, never written.

    Attributes:
        codes: (out, in), integers 0 ... 2^bits - 1 as uint8, or floats as float8_e4m3fn.
        scales: (out, groups), in the dtype that the checkpoint stores.
        zeros: (out, groups), integers as int16; None if there are none, or all are in the
            middle by definition.
        group_of_input: (in,), int64.
        least_zero: the format's least zero point; there are 2^bits of them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of_input: torch.Tensor
    bits: int
    least_zero: int = 0

    @property
    @override
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @override
    def parameters(self) -> dict[str, torch.Tensor]:
        if self.codes.is_floating_point():
            return {}
        zeros: dict[str, torch.Tensor] = {} if self.zeros is None else {"zeros": self.zeros}
        return {"scales": self.scales, **zeros, "codes": self.codes}

    @override
    def dequantised(self) -> torch.Tensor:
        middle = 0.0 if self.codes.is_floating_point() else 2.0 ** (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros.float()[:, self.group_of_input]
        return (self.codes.float() - zeros) * self.scales.float()[:, self.group_of_input]

    @override
    def moved(self, values: Mapping[str, torch.Tensor]) -> "CodesAndScales":
        """This weight with other parameters, given as the search spaces keep them.

        Args:
            values: float32 tensors of the parameters' shapes, of those that move:

                - scales: factors on the base's scales; the product is rounded to float32, and then
                  to the dtype that the checkpoint stores.
                - zeros: offsets from the base's zero points, as fractions of half the codes' range;
                  the nearest integer is added.
                - codes: the codes themselves, rounded to the nearest integer.
        """
        changed: dict[str, torch.Tensor] = {}
        if (factors := values.get("scales")) is not None:
            changed["scales"] = (self.scales.float() * factors).to(self.scales.dtype)
        if (offsets := values.get("zeros")) is not None and self.zeros is not None:
            steps = (offsets * 2.0 ** (self.bits - 1)).round()
            most = self.least_zero + 2**self.bits - 1
            zeros = (self.zeros.float() + steps).clamp(self.least_zero, most)
            changed["zeros"] = zeros.to(self.zeros.dtype)
        if (codes := values.get("codes")) is not None:
            changed["codes"] = codes.round().clamp(0, 2**self.bits - 1).to(self.codes.dtype)
        return dataclasses.replace(self, **changed)  # pyright: ignore[reportArgumentType]

    @override
    def to(self, device: torch.device) -> "CodesAndScales":
        return dataclasses.replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            group_of_input=self.group_of_input.to(device),
        )


def layer_and_kind(name: str) -> tuple[str, Kind]:
    """The inverse of `parameter_name`; raises ValueError for other names."""
    layer, _, kind = name.rpartition(".")
    if kind not in KINDS:
        raise ValueError(f"{name} is no parameter of a quantised layer")
    return layer, kind
