"""Checkpoints whose linear weights are quantised, for code that loads, moves and writes them.

A quantised weight is made of other tensors, its parameters: codes, scales and zero points.

    W[o, i] = (code[o, i] - zero[o, g(i)]) · scale[o, g(i)]

Codes are integers of a few bits, 0 ... 2^bits - 1, or floats of 8 bits without zero points. A scale
is shared by a group g of an output's inputs, or by all of them (GPTQ, Frantar et al. 2022,
arXiv:2210.17323; AWQ, arXiv:2306.00978); those of blocks (DeepSeek-V3, arXiv:2412.19437) are
repeated for each output. Integers without zero points have all in the middle, 2^(bits - 1). The
weight is computed in float32, where the difference is exact and the product is rounded once, and
then cast to the dtype that samples. Activations are not rounded: where a checkpoint asks for it
(W8A8), vLLM does, and the model computed here is that of these weights.

Models always derive the weight from the parameters, and search spaces may move those of integers,
each under the layer's name with its kind after it: `model.layers.0.mlp.up_proj.scales`. What moved
is a quantised weight again (`QuantisedWeight.moved`), with scales in the dtype that the checkpoint
stores and integers in its range: every genome is a checkpoint that could be written as it is.

How files store them is a matter of the quantisation method, as transformers calls it in
`config.json` (`quant_method`); those that are registered in the group `quantisations` can be read.

Left out: moving floats, whose steps differ in size.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast

import torch
from torch import nn

from es_cookbook.checkpoints.model_files import CONFIG, find_file
from es_cookbook.checkpoints.tensors import ReadTensors
from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import LARGEST_CONFIG, parsed, read_file
from es_cookbook.common.registry import Registered
from es_cookbook.common.trust import load

QUANTISATIONS = Registered("quantisations")
"""`quant_method` -> a function that opens such a checkpoint, `OpenCheckpoint`."""
QUANTISATION_FIELDS = ("quantization_config", "compression_config")
"""Fields of config.json that say how weights are quantised, the first that is there."""


Kind: TypeAlias = Literal["codes", "scales", "zeros"]
KINDS: tuple[Kind, ...] = ("scales", "zeros", "codes")
"""Kinds, in the order in which a layer's parameters are listed."""


@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A quantised weight, which is never changed in place.

    Attributes:
        codes: (out, in), integers 0 ... 2^bits - 1 as uint8, or floats as float8_e4m3fn.
        scales: (out, groups), in the dtype that the checkpoint stores.
        zeros: (out, groups), integers as int16; None if there are none, or all are in the
            middle by definition.
        group_of_input: (in,), int64.
        bits: bits of a code.
        least_zero: the format's least zero point; there are 2^bits of them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_of_input: torch.Tensor
    bits: int
    least_zero: int = 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight: (out, in)."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """Intended dtype of the weight, used if the model's config does not say."""
        return self.scales.dtype

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors that search spaces may move, by kind, each with two axes."""
        if self.codes.is_floating_point():
            return {}
        zeros: dict[str, torch.Tensor] = {} if self.zeros is None else {"zeros": self.zeros}
        return {"scales": self.scales, **zeros, "codes": self.codes}

    def dequantised(self) -> torch.Tensor:
        """Return the weight (out, in) in float32."""
        middle = 0.0 if self.codes.is_floating_point() else 2.0 ** (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros.float()[:, self.group_of_input]
        return (self.codes.float() - zeros) * self.scales.float()[:, self.group_of_input]

    def moved(self, values: Mapping[str, torch.Tensor]) -> "QuantisedWeight":
        """Return this weight with other parameters, given as the search spaces keep them.

        Args:
            values: float32 tensors of the parameters' shapes, of those that move:

                - scales: factors on the base's scales; the product is rounded to float32, and then
                  to the dtype that the checkpoint stores.
                - zeros: offsets from the base's zero points, as fractions of half the codes' range;
                  the nearest integer is added.
                - codes: the codes themselves, rounded to the nearest integer.
        """
        changed: dict[str, Any] = {}
        if (factors := values.get("scales")) is not None:
            changed["scales"] = (self.scales.float() * factors).to(self.scales.dtype)
        if (offsets := values.get("zeros")) is not None and self.zeros is not None:
            steps = (offsets * 2.0 ** (self.bits - 1)).round()
            most = self.least_zero + 2**self.bits - 1
            zeros = (self.zeros.float() + steps).clamp(self.least_zero, most)
            changed["zeros"] = zeros.to(self.zeros.dtype)
        if (codes := values.get("codes")) is not None:
            changed["codes"] = codes.round().clamp(0, 2**self.bits - 1).to(self.codes.dtype)
        return dataclasses.replace(self, **changed)

    def to(self, device: torch.device) -> "QuantisedWeight":
        """Return the same weight on another device."""
        return dataclasses.replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            group_of_input=self.group_of_input.to(device),
        )

    def __deepcopy__(self, memo: Mapping[int, object]) -> Self:
        """Return itself: copies of a model share it."""
        return self


class QuantisedCheckpoint(ABC):
    """A checkpoint whose linear weights are quantised, all or some.

    Attributes:
        files: its tensors as they are stored, by name.
        layers: names of the quantised layers.
    """

    files: ReadTensors
    layers: tuple[str, ...]

    @property
    @abstractmethod
    def packages(self) -> str:
        """Names of the packages that transformers needs to load it."""

    @abstractmethod
    def weight(self, layer: str) -> QuantisedWeight:
        """Read the weight of a layer."""

    @abstractmethod
    def outline(self, layer: str) -> QuantisedWeight:
        """Return the shapes and dtypes of a layer, on the meta device: no numbers are read."""

    @abstractmethod
    def parameters(self) -> ReadTensors:
        """Return the parameters of all layers, by name."""

    @abstractmethod
    def plain(self, names: Collection[str], dtype: torch.dtype) -> ReadTensors:
        """Return the model's own parameters whose tensors are stored under these names.

        Quantised weights are dequantised, in `dtype`; all else, also biases of quantised layers, is
        as stored. Reading a tensor raises a ModelError if it needs scales that are missing.
        """

    @abstractmethod
    def write(self, directory: Path, moved: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the checkpoint into a directory, file by file, with some parameters moved.

        Those are float32, as in `QuantisedWeight.moved`; all else is written bit for bit.
        """


OpenCheckpoint: TypeAlias = Callable[[str, Mapping[str, object]], QuantisedCheckpoint]
"""(model name, quantisation part of its config) -> checkpoint; a ModelError says what is wrong or
not known."""


class QuantLinear(nn.Linear):
    """A linear layer, with a dequantised weight, that knows which quantised one it comes from."""

    def __init__(self, layer: nn.Linear, quantised: QuantisedWeight) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.quantised = quantised


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """Yield the name and weight of each quantised linear layer, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module.quantised


def parameter_name(layer: str, kind: str) -> str:
    """Return the name of a quantised layer's parameter.

    >>> parameter_name("model.layers.0.mlp.up_proj", "scales")
    'model.layers.0.mlp.up_proj.scales'
    """
    return f"{layer}.{kind}"


def is_quantised(model_name: str) -> bool:
    """Return whether a model's config says that its weights are quantised, by any method."""
    return _settings(model_name) is not None


def quantised_checkpoint(model_name: str) -> QuantisedCheckpoint | None:
    """Open a quantised checkpoint, whose numbers are read when they are asked for; None if plain.

    Raises:
        ModelError: By a method that is not registered, or it cannot be read.
    """
    settings = _settings(model_name)
    if settings is None:
        return None
    method = str(settings.get("quant_method"))
    if method not in QUANTISATIONS:
        raise ModelError(
            f"model_name: {model_name!r} is quantised, as {QUANTISATION_FIELDS[0]} in its {CONFIG} "
            f"says, in a way that is not known here: it is {method}; accepted are "
            f"{', '.join(QUANTISATIONS)}"
        )
    opened = cast(OpenCheckpoint, load(QUANTISATIONS[method]))
    return opened(model_name, settings)


def _settings(model_name: str) -> Mapping[str, object] | None:
    path = find_file(model_name, CONFIG)
    if path is None:
        return None
    try:
        config = cast("dict[str, object]", parsed(read_file(path, LARGEST_CONFIG, None)))
        found = next((how for key in QUANTISATION_FIELDS if (how := config.get(key))), None)
    except (OSError, ValueError, AttributeError):  # Loading the model reports it.
        return None
    return cast("dict[str, object]", found) if isinstance(found, dict) else None
