"""Quantised linear weights: whole numbers, scales and zero points, in memory and on the disk.

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

Two formats of files are known, which differ in names and in what is transposed:

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast

import torch
from safetensors.torch import save_file
from torch import nn

from es_cookbook.checkpoints.model_files import copy_file, find_file, weight_paths
from es_cookbook.checkpoints.tensors import ReadTensors, weight_files
from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import LARGEST_CONFIG, parsed, read_file

Kind: TypeAlias = Literal["codes", "scales", "zeros"]
KINDS: tuple[Kind, ...] = ("scales", "zeros", "codes")
"""In the order in which a layer's parameters are listed."""

_ACCEPTED = (
    "accepted are gptq, and compressed-tensors in the format pack-quantized with one group of "
    "settings; both with 4 or 8 bits, and one scale for each output or group of inputs"
)
_ALSO_COPIED = ("config.json", "generation_config.json", "model.safetensors.index.json")
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A quantised weight, never written.

    Attributes:
        codes: (out, in), whole numbers 0 ... 2^bits - 1 as uint8.
        scales: (out, groups), in the dtype that the checkpoint stores.
        zeros: (out, groups), whole numbers as int16; None if all are 2^(bits - 1) by definition.
        group_of_input: (in,), int64.
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
        zeros: dict[Kind, torch.Tensor] = {} if self.zeros is None else {"zeros": self.zeros}
        return {"scales": self.scales, **zeros, "codes": self.codes}

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


def parameter_name(layer: str, kind: Kind) -> str:
    """Name of a quantised layer's parameter.

    >>> parameter_name("model.layers.0.mlp.up_proj", "scales")
    'model.layers.0.mlp.up_proj.scales'
    """
    return f"{layer}.{kind}"


def layer_and_kind(name: str) -> tuple[str, Kind]:
    """The inverse of `parameter_name`; a ValueError where there is none."""
    layer, _, kind = name.rpartition(".")
    if kind not in KINDS:
        raise ValueError(f"{name} is no parameter of a quantised layer")
    return layer, kind


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a format stores a layer.

    Attributes:
        names: suffix of the tensor that has the codes, the scales, the zero points.
        group_of_input: suffix of the tensor that says which group each input is in.
        transposed: whether inputs come before outputs.
        least_zero: the zero point that is stored as 0.
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
        files: its tensors by name.
        layers: names of the quantised ones.
    """

    model_name: str
    layout: _Layout
    files: ReadTensors
    layers: tuple[str, ...]

    def weight(self, layer: str) -> QuantisedWeight:
        """One layer's, unpacked."""
        return self.layout.read(self.files, layer)

    def outline(self, layer: str) -> QuantisedWeight:
        """One layer's shapes and dtypes: its numbers are on the meta device, and are not read."""
        numbers = {f"{layer}.{suffix}" for suffix in self.layout.names.values()}
        stored = {
            name: self.files[name].to("meta") if name in numbers else self.files[name]
            for name in self._stored_names(layer)
        }
        return self.layout.read(stored, layer)

    def plain_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is not quantised, biases of quantised layers too."""
        quantised = {name for layer in self.layers for name in self._stored_names(layer)}
        return ((name, self.files[name]) for name in self.files if name not in quantised)

    def _stored_names(self, layer: str) -> list[str]:
        layout = self.layout
        suffixes = (*layout.names.values(), layout.group_of_input, *layout.others)
        return [name for suffix in suffixes if (name := f"{layer}.{suffix}") in self.files]

    def write(self, directory: Path, moved: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the checkpoint into a directory, file by file, with some parameters moved.

        Those are float32, as in `QuantisedWeight.moved`; all else is written bit for bit.
        """
        changed: dict[str, torch.Tensor] = {}
        for name, value in moved:
            layer, kind = layer_and_kind(name)
            weight = self.weight(layer).moved({kind: value.cpu()})
            changed[f"{layer}.{self.layout.names[kind]}"] = self.layout.stored(weight, kind)
        for path in weight_paths(self.model_name):
            tensors = weight_files([path])
            save_file(
                {name: changed[name] if name in changed else tensors[name] for name in tensors},
                directory / path.with_suffix(".safetensors").name,
                {"format": "pt"},
            )
        for name in _ALSO_COPIED:
            if path := find_file(self.model_name, name):
                copy_file(path, directory)


def quantised_parameters(model_name: str) -> Mapping[str, torch.Tensor]:
    """What search spaces may move of a quantised checkpoint, read when it is asked for.

    Raises:
        ModelError: As `quantised_checkpoint`.
    """
    checkpoint = quantised_checkpoint(model_name)
    kinds: list[Kind] = [k for k in KINDS if k != "zeros" or not checkpoint.layout.symmetric]
    places: dict[str, tuple[str, Kind]] = {
        parameter_name(layer, kind): (layer, kind) for layer in checkpoint.layers for kind in kinds
    }

    def read(name: str) -> torch.Tensor:
        layer, kind = places[name]
        return checkpoint.weight(layer).parameters()[kind]

    return ReadTensors(places, read)


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
    files = weight_files(paths)
    ending = f".{layout.names['codes']}"
    layers = tuple(name.removesuffix(ending) for name in files if name.endswith(ending))
    if not layers:
        raise ModelError(
            f"model_name: the config of {model_name!r} says that it is quantised, and its files "
            f"have no tensor named *{ending}"
        )
    return QuantisedCheckpoint(model_name, layout, files, layers)


def unpack(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Numbers of a few bits out of 32-bit words, the lowest bits first, as uint8.

    >>> unpack(torch.tensor([[0x21]], dtype=torch.int32), 4, axis=1).tolist()
    [[1, 2, 0, 0, 0, 0, 0, 0]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
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
        config = cast("dict[str, Any]", parsed(read_file(path, LARGEST_CONFIG, None)))
        return config.get("quantization_config") or config.get("compression_config")
    except (OSError, ValueError, AttributeError):  # who loads the model says so
        return None


def _layout(model_name: str, how: dict[str, Any]) -> _Layout:
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


def _gptq(how: dict[str, Any]) -> _Layout | str:
    version = how.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        return f"its checkpoint_format is {version}"
    if how.get("bits") not in (4, 8):
        return f"it has {how.get('bits')} bits"
    if how.get("dynamic"):
        return "its layers differ (dynamic)"
    return _Layout(
        names={"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
        group_of_input="g_idx",
        others=(),
        transposed=True,
        least_zero=1 if version == "gptq" else 0,
        bits=how["bits"],
        symmetric=bool(how.get("sym", True)),
    )


def _compressed_tensors(how: dict[str, Any]) -> _Layout | str:
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
    return _Layout(
        names={"codes": "weight_packed", "scales": "weight_scale", "zeros": "weight_zero_point"},
        group_of_input="weight_g_idx",
        others=("weight_shape",),
        transposed=False,
        least_zero=0,
        bits=weights["num_bits"],
        symmetric=bool(weights.get("symmetric", True)),
    )
