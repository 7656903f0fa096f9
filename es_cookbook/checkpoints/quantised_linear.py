"""A linear weight as its quantised checkpoint has it: whole numbers, scales and zero points.

    W[o, i] = (code[o, i] - zero[o, g(i)]) · scale[o, g(i)]

with codes of a few bits, 0 ... 2^bits - 1, and a scale (and a zero point) for each output and group
of inputs g. That is the layout of GPTQ (Frantar et al. 2022, arXiv:2210.17323) and of every other
format with groups; a symmetric one has its zero points all in the middle, 2^(bits - 1), and stores
none. The weight is computed in float32, where the difference is exact and the product is rounded
once, and then cast to the dtype that samples: it is always derived, never the truth.

What search spaces move are the parameters of a `QuantisedWeight`, each a tensor (out, ...) under
the layer's name with `.scales`, `.zeros` or `.codes` after it; `moved` says what their values make
of it. The result is a quantised weight again, with scales in the dtype that the checkpoint stores
and whole numbers in its range: every genome is a checkpoint that could be written as it is.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, Self, TypeAlias

import torch
from torch import nn

Kind: TypeAlias = Literal["codes", "scales", "zeros"]
KINDS: tuple[Kind, ...] = ("scales", "zeros", "codes")
"""In the order in which a layer's parameters are listed."""


@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A quantised weight, never written.

    Attributes:
        codes: (out, in), whole numbers 0 ... 2^bits - 1 as uint8.
        scales: (out, groups), in the dtype that the checkpoint stores.
        zeros: (out, groups), whole numbers as int16; None if all are 2^(bits - 1) by definition.
        group_of_input: (in,), int64.
        bits: of a code.
        least_zero: the format's least zero point; there are 2^bits of them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of_input: torch.Tensor
    bits: int
    least_zero: int = 0

    def __deepcopy__(self, memo: Mapping[int, object]) -> Self:
        """Itself: copies of a model share it."""
        return self

    def parameters(self) -> dict[Kind, torch.Tensor]:
        """What search spaces may move."""
        found: dict[Kind, torch.Tensor] = {"scales": self.scales}
        if self.zeros is not None:
            found["zeros"] = self.zeros
        found["codes"] = self.codes
        return found

    def dequantised(self) -> torch.Tensor:
        """The weight (out, in) in float32."""
        zeros = 2.0 ** (self.bits - 1)
        if self.zeros is not None:
            zeros = self.zeros.float()[:, self.group_of_input]
        return (self.codes.float() - zeros) * self.scales.float()[:, self.group_of_input]

    def moved(self, values: Mapping[Kind, torch.Tensor]) -> "QuantisedWeight":
        """This weight with other parameters, given as the search spaces keep them.

        Args:
            values: float32 tensors of the parameters' shapes, of those that move:

                - scales: factors on the base's scales; the product is rounded to float32, and then
                  to the dtype that the checkpoint stores.
                - zeros: offsets from the base's zero points, as fractions of half the codes' range;
                  the nearest whole number is added.
                - codes: the codes themselves, taken to the nearest whole number.
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

    def to(self, device: torch.device) -> "QuantisedWeight":
        """The same on another device."""
        return dataclasses.replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            group_of_input=self.group_of_input.to(device),
        )


class QuantLinear(nn.Linear):
    """A linear layer that knows of its weight how it is quantised.

    Args:
        layer: what it takes the place of; its weight is the dequantised one.
        quantised: where that comes from.
    """

    def __init__(self, layer: nn.Linear, quantised: QuantisedWeight) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.quantised = quantised


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """Name and weight of each quantised linear layer, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module.quantised


def parameter_name(layer: str, kind: Kind) -> str:
    """Name of a quantised layer's parameter.

    >>> parameter_name("model.layers.0.mlp.up_proj", "scales")
    'model.layers.0.mlp.up_proj.scales'
    """
    return f"{layer}.{kind}"


def layer_and_kind(name: str) -> tuple[str, Kind]:
    """The inverse of `parameter_name`.

    Raises:
        ValueError: It is no parameter of a quantised layer.
    """
    layer, _, kind = name.rpartition(".")
    if kind not in KINDS:
        raise ValueError(f"{name} is no parameter of a quantised layer")
    return layer, kind
