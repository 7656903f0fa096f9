"""Quantised checkpoints on the disk: read into whole numbers and scales, and written again.

Two formats are known, which differ in names and in what is transposed:

- GPTQ, as AutoGPTQ and GPTQModel write it and vLLM reads it: `qweight` (in / n, out), `scales`
  (groups, out), `qzeros` (groups, out / n), `g_idx` (in). Its first version stores zero points less
  one; `checkpoint_format: gptq_v2` stores them as they are.
- compressed-tensors' `pack-quantized`, as its own compressor of that name writes it:
  `weight_packed` (out, in / n), `weight_scale` (out, groups), `weight_zero_point` (out / n,
  groups), `weight_shape`, and `weight_g_idx` (in) where inputs were reordered. Its numbers are
  signed and packed with 2^(bits - 1) added, zero points too.

In both n = 32 / bits numbers are in a 32-bit word, the first in its lowest bits, codes along the
inputs and zero points along the outputs.

Left out: codes of other than 4 or 8 bits, quantised activations, and formats whose numbers are no
whole ones (fp8, nf4): what a scale or a code of theirs is differs.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from es_cookbook.checkpoints.quantised_linear import (
    KINDS,
    Kind,
    QuantisedWeight,
    layer_and_kind,
    parameter_name,
)
from es_cookbook.checkpoints.weights import WeightFiles, find_file, weight_paths
from es_cookbook.common.errors import ModelError

_ACCEPTED = (
    "accepted are gptq, and compressed-tensors in the format pack-quantized with one group of "
    "settings; both with 4 or 8 bits, and one scale for each output or group of inputs"
)
_ALSO_COPIED = ("config.json", "generation_config.json", "model.safetensors.index.json")
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a format stores a layer.

    Attributes:
        names: suffix of the tensor that has the codes, the scales, the zero points.
        group_of_input: suffix of the tensor that says which group each input is in.
        others: suffixes of further tensors.
        transposed: whether inputs come before outputs.
        least_zero: the zero point that is stored as 0.
        bits: of a code.
        symmetric: no zero points, or none that count.
    """

    names: Mapping[Kind, str]
    group_of_input: str
    others: tuple[str, ...]
    transposed: bool
    least_zero: int
    bits: int
    symmetric: bool

    def read(self, stored: Mapping[str, torch.Tensor], layer: str) -> QuantisedWeight:
        """Unpack a layer.

        Raises:
            ModelError: A tensor is missing, or does not fit the others.
        """

        def get(suffix: str) -> torch.Tensor:
            name = f"{layer}.{suffix}"
            if name not in stored:
                raise ModelError(f"model_name: the quantised checkpoint lacks {name}")
            return stored[name]

        def upright(suffix: str) -> torch.Tensor:
            return get(suffix).T if self.transposed else get(suffix)

        scales = upright(self.names["scales"]).contiguous()
        if scales.dim() != 2 or scales.dtype not in _SCALE_DTYPES:
            raise ModelError(
                f"model_name: the scales of {layer} are {scales.dtype} of shape "
                f"{tuple(scales.shape)}, and must be float16, bfloat16 or float32, one for each "
                "output and group of inputs"
            )
        words = upright(self.names["codes"])
        inputs = words.shape[1] * 32 // self.bits
        if "weight_shape" in self.others:
            inputs = int(get("weight_shape")[1])
        codes = unpack(words, self.bits, axis=1)[:, :inputs].contiguous()
        outputs, groups = scales.shape
        group_of_input = f"{layer}.{self.group_of_input}"
        if group_of_input in stored:
            group = stored[group_of_input].long()
        else:
            group = torch.arange(inputs) // -(-inputs // groups)
        zeros = None
        if not self.symmetric:
            zeros = unpack(upright(self.names["zeros"]), self.bits, axis=0)[:outputs]
            zeros = zeros.to(torch.int16) + self.least_zero
        fits = codes.shape == (outputs, len(group)) and int(group.max()) < groups
        if not fits or (zeros is not None and zeros.shape != scales.shape):
            raise ModelError(
                f"model_name: codes, scales and zero points of {layer} are not of one layer"
            )
        return QuantisedWeight(codes, scales, zeros, group, self.bits, self.least_zero)

    def stored(self, weight: QuantisedWeight, kind: Kind) -> torch.Tensor:
        """One of a weight's parameters as the format stores it."""
        if kind == "scales":
            tensor = weight.scales
        elif kind == "zeros":
            assert weight.zeros is not None, "a symmetric format stores no zero points"
            tensor = pack(weight.zeros - self.least_zero, self.bits, axis=0)
        else:
            tensor = pack(weight.codes, self.bits, axis=1)
        return (tensor.T if self.transposed else tensor).contiguous()


@dataclasses.dataclass(frozen=True)
class QuantisedCheckpoint:
    """A checkpoint whose linear weights are quantised, all or some.

    Attributes:
        model_name: directory or Hub name.
        layout: how.
        files: its tensors by name.
        layers: names of the quantised ones.
    """

    model_name: str
    layout: Layout
    files: WeightFiles
    layers: tuple[str, ...]

    def weight(self, layer: str) -> QuantisedWeight:
        """One layer's, unpacked."""
        return self.layout.read(self.files, layer)

    def outline(self, layer: str) -> QuantisedWeight:
        """One layer's shapes and dtypes, without its numbers: tensors of the meta device."""
        return self.weight(layer).to(torch.device("meta"))

    def plain_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is not quantised, biases of quantised layers too."""
        layout = self.layout
        suffixes = (*layout.names.values(), layout.group_of_input, *layout.others)
        quantised = {f"{layer}.{suffix}" for layer in self.layers for suffix in suffixes}
        return ((name, self.files[name]) for name in self.files if name not in quantised)

    def stored(self, name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What a moved parameter changes in the files: a tensor's name, and that tensor.

        Args:
            name: of a scales, zeros or codes parameter.
            value: float32, as a search space keeps it (`QuantisedWeight.moved`).
        """
        layer, kind = layer_and_kind(name)
        moved = self.weight(layer).moved({kind: value.cpu()})
        return f"{layer}.{self.layout.names[kind]}", self.layout.stored(moved, kind)

    def write(self, directory: Path, changed: Mapping[str, torch.Tensor]) -> None:
        """Write the checkpoint with some tensors changed, file by file; all else bit for bit.

        Args:
            directory: there already.
            changed: stored name -> tensor, of the stored dtype and shape.
        """
        for path in weight_paths(self.model_name):
            tensors = WeightFiles([path])
            save_file(
                {name: changed[name] if name in changed else tensors[name] for name in tensors},
                directory / path.with_suffix(".safetensors").name,
                {"format": "pt"},
            )
        for name in _ALSO_COPIED:
            if path := find_file(self.model_name, name):
                shutil.copyfile(path, directory / name)


class QuantisedParameters(Mapping[str, torch.Tensor]):
    """Scales, zero points and codes by their parameters' names, read when they are asked for."""

    def __init__(self, checkpoint: QuantisedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        layer, kind = layer_and_kind(name)
        return self._checkpoint.weight(layer).parameters()[kind]

    def __iter__(self) -> Iterator[str]:
        kinds: tuple[Kind, ...] = (
            ("scales", "codes") if self._checkpoint.layout.symmetric else KINDS
        )
        for layer in self._checkpoint.layers:
            yield from (parameter_name(layer, kind) for kind in kinds)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_quantised(model_name: str) -> bool:
    """Whether a model's config says that its weights are quantised, in whatever format."""
    return _quantisation(model_name) is not None


def quantised_checkpoint(model_name: str) -> QuantisedCheckpoint:
    """Open a quantised checkpoint; its numbers are read when they are asked for.

    Raises:
        ModelError: It is not quantised, in another format than the known ones, or cannot be read.
    """
    how = _quantisation(model_name)
    if how is None:
        raise ModelError(f"model_name: {model_name!r} is not quantised; {_ACCEPTED}")
    layout = _layout(model_name, how)
    paths = weight_paths(model_name)
    if any(path.suffix != ".safetensors" for path in paths):
        raise ModelError(f"model_name: quantised weights must be in safetensors, found {paths[0]}")
    files = WeightFiles(paths)
    ending = f".{layout.names['codes']}"
    layers = tuple(name.removesuffix(ending) for name in files if name.endswith(ending))
    if not layers:
        raise ModelError(
            f"model_name: the config of {model_name!r} says that it is quantised, and its files "
            f"have no tensor named *{ending}"
        )
    return QuantisedCheckpoint(model_name, layout, files, layers)


def quantised_parameters(model_name: str) -> QuantisedParameters:
    """What search spaces may move of a quantised checkpoint.

    Raises:
        ModelError: As `quantised_checkpoint`.
    """
    return QuantisedParameters(quantised_checkpoint(model_name))


def unpack(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Numbers of a few bits out of 32-bit words, the lowest bits first, as uint8.

    >>> unpack(torch.tensor([[0x21]], dtype=torch.int32), 4, axis=1).tolist()
    [[1, 2, 0, 0, 0, 0, 0, 0]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[axis + 1] = -1
    numbers = (words.unsqueeze(axis + 1) >> shifts.view(shape)) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(axis, axis + 1)


def pack(numbers: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The inverse of `unpack`; a last word that is not full is filled with zeros.

    >>> pack(torch.tensor([[1, 2]]), 4, axis=1).tolist()
    [[33]]
    """
    per_word = 32 // bits
    numbers = numbers.to(torch.int64).movedim(axis, -1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    shifts = torch.arange(0, 32, bits)
    words = (numbers.unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words)  # int32 is signed
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def _quantisation(model_name: str) -> dict[str, Any] | None:
    path = find_file(model_name, "config.json")
    if path is None:
        return None
    try:
        config = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # who loads the model says so
        return None
    return config.get("quantization_config") or config.get("compression_config")


def _layout(model_name: str, how: dict[str, Any]) -> Layout:
    method = how.get("quant_method")
    if method == "gptq":
        found = _gptq(how)
    elif method == "compressed-tensors":
        found = _compressed_tensors(how)
    else:
        found = f"it is {method}"
    if isinstance(found, str):
        raise ModelError(
            f"model_name: {model_name!r} is quantised in a way that is not known here: {found}; "
            f"{_ACCEPTED}"
        )
    return found


def _gptq(how: dict[str, Any]) -> Layout | str:
    version = how.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        return f"its checkpoint_format is {version}"
    if how.get("bits") not in (4, 8):
        return f"it has {how.get('bits')} bits"
    if how.get("dynamic"):
        return "its layers differ (dynamic)"
    return Layout(
        names={"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
        group_of_input="g_idx",
        others=(),
        transposed=True,
        least_zero=1 if version == "gptq" else 0,
        bits=how["bits"],
        symmetric=bool(how.get("sym", True)),
    )


def _compressed_tensors(how: dict[str, Any]) -> Layout | str:
    if how.get("format") != "pack-quantized":
        return f"its format is {how.get('format')}"
    for more in ("transform_config", "kv_cache_scheme"):
        if how.get(more):
            return f"it has a {more}"
    groups = cast("dict[str, dict[str, Any]]", how.get("config_groups") or {})
    if len(groups) != 1:
        return f"it has {len(groups)} config_groups"
    (group,) = groups.values()
    if group.get("input_activations") or group.get("output_activations"):
        return "its activations are quantised"
    weights = cast("dict[str, Any]", group.get("weights") or {})
    if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
        return f"it has {weights.get('num_bits')} bits of type {weights.get('type')}"
    if weights.get("strategy", "group") not in ("group", "channel"):
        return f"its strategy is {weights.get('strategy')}"
    return Layout(
        names={"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point"},
        group_of_input="weight_g_idx",
        others=("weight_shape",),
        transposed=False,
        least_zero=0,
        bits=weights["num_bits"],
        symmetric=bool(weights.get("symmetric", True)),
    )
