"""Checkpoints whose linear weights are quantised, for code that loads, moves and writes them.

A quantised weight is made of other tensors, its parameters: codes, scales, zero points. Models have
the weight that they stand for, always derived, and search spaces may move the parameters, each
under the layer's name with its kind after it: `model.layers.0.mlp.up_proj.scales`.

How files store them is a matter of the quantisation method, as transformers calls it in
`config.json` (`quant_method`); those that are registered in the group `quantisations` can be read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self, TypeAlias, cast

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


class QuantisedWeight(ABC):
    """A quantised weight, never written.

    Attributes:
        bits: bits of its codes.
    """

    bits: int

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the weight: (out, in)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Intended dtype of the weight, used if the model's config does not say."""

    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Kind -> tensor that search spaces may move, with two axes."""

    @abstractmethod
    def dequantised(self) -> torch.Tensor:
        """The weight (out, in) in float32."""

    @abstractmethod
    def moved(self, values: Mapping[str, torch.Tensor]) -> "QuantisedWeight":
        """This weight with other parameters: kind -> float32, as the search spaces keep them."""

    @abstractmethod
    def to(self, device: torch.device) -> "QuantisedWeight":
        """The same on another device."""

    def __deepcopy__(self, memo: Mapping[int, object]) -> Self:
        """Itself: copies of a model share it."""
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
        """Packages that transformers needs to load it, in words."""

    @abstractmethod
    def weight(self, layer: str) -> QuantisedWeight:
        """The weight of a layer."""

    @abstractmethod
    def outline(self, layer: str) -> QuantisedWeight:
        """Its shapes and dtypes, on the meta device: no numbers are read."""

    @abstractmethod
    def parameters(self) -> ReadTensors:
        """The parameters of all layers, by name."""

    @abstractmethod
    def plain(self, names: Collection[str], dtype: torch.dtype) -> ReadTensors:
        """The model's own parameters whose tensors are stored under these names.

        Quantised weights are dequantised, in `dtype`; all else, their layers' biases too, is as
        stored. Reading one raises a ModelError if its numbers mean nothing without scales, and
        there are none.
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
    """Name and weight of each quantised linear layer, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name, module.quantised


def parameter_name(layer: str, kind: str) -> str:
    """Name of a quantised layer's parameter.

    >>> parameter_name("model.layers.0.mlp.up_proj", "scales")
    'model.layers.0.mlp.up_proj.scales'
    """
    return f"{layer}.{kind}"


def is_quantised(model_name: str) -> bool:
    """Whether a model's config says that its weights are quantised, by any method."""
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
