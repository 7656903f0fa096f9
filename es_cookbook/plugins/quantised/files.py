"""Files of quantised checkpoints: how each format stores a `QuantisedWeight`.

A format is a `_Layout`: names of tensors, how numbers are packed, and what shares a scale.

- GPTQ, as AutoGPTQ and GPTQModel write it and vLLM reads it: `qweight` (in / n, out), `scales`
  (groups, out), `qzeros` (groups, out / n), `g_idx` (in). Its first version stores zero points less
  one; `checkpoint_format: gptq_v2` stores them as they are.
- AWQ, as AutoAWQ writes it in its version GEMM: `qweight` (in, out / 8), `scales`, `qzeros`, both
  packed along the outputs: a word has 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on.
- compressed-tensors, as its own compressors write it: `weight_packed`, or `weight` where a number
  has a separate byte, `weight_scale`, `weight_zero_point`. Its integers are signed, and have
  2^(bits - 1) added where they are packed, along the inputs, and zero points along the outputs.
- fp8, as transformers and vLLM read it: `weight` in float8_e4m3fn, with `weight_scale_inv` by block
  (a factor like the others, despite its name), or one `weight_scale`.

Elsewhere n = 32 / bits numbers are in a 32-bit word, the first in its lowest bits.

Left out: 3 bits, whose numbers cross words, other floats (FP4, MX, nf4, e5m2), and formats of one
kernel.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors.torch import save_file
from typing_extensions import override

from es_cookbook.checkpoints.model_files import copy_file, find_file, weight_paths
from es_cookbook.checkpoints.quantised import (
    KINDS,
    Kind,
    QuantisedCheckpoint,
    QuantisedWeight,
    parameter_name,
)
from es_cookbook.checkpoints.tensors import ReadTensors, weight_files
from es_cookbook.common.errors import ModelError

_ACCEPTED = (
    "accepted are gptq with 2, 4 or 8 bits, awq in the version gemm with 4 bits, fp8, and "
    "compressed-tensors with one group of settings in the formats pack-quantized, int-quantized, "
    "float-quantized and naive-quantized"
)
_ALSO_COPIED = ("config.json", "generation_config.json", "model.safetensors.index.json")
_PACKAGES = {"gptq": "gptqmodel and optimum", "awq": "gptqmodel"}
"""`quant_method` -> what transformers needs to load it, where that is not compressed-tensors."""
_BITS = {
    ("pack-quantized", "int"): (2, 4, 8),
    ("int-quantized", "int"): (4, 8),
    ("naive-quantized", "int"): (4, 8),
    ("float-quantized", "float"): (8,),
    ("naive-quantized", "float"): (8,),
}
"""compressed-tensors' format and type -> bits; the first packs its integers into words."""
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_Names: TypeAlias = Mapping[Kind, str]
_WEIGHTS: _Names = {"codes": "weight", "scales": "weight_scale", "zeros": "weight_zero_point"}
_QWEIGHTS: _Names = {"codes": "qweight", "scales": "scales", "zeros": "qzeros"}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The layout in which a format stores a layer.

    Attributes:
        format: its name in config.json.
        names: suffix of the tensor that has the codes, the scales, the zero points.
        bits: bits of a code.
        group_size: number of inputs that share a scale; 0: all of an output.
        symmetric: no zero points, or none that count.
        packed: several numbers in a 32-bit word; else one in a byte.
        floats: codes are float8_e4m3fn.
        num_outputs: number of outputs that share a scale; 0: all.
        others: suffixes of further tensors that are not weights of the model.
        group_of_input: suffix of the tensor that says which group each input is in.
        transposed: whether inputs come before outputs.
        axis: axis along which codes are packed in words: 0 is outputs, 1 inputs.
        order: order of the numbers in the eight places of a word.
        least_zero: the zero point that is stored as 0.
    """

    format: str
    names: _Names
    bits: int
    group_size: int
    symmetric: bool
    packed: bool = True
    floats: bool = False
    num_outputs: int = 1
    others: tuple[str, ...] = ()
    group_of_input: str = "g_idx"
    transposed: bool = False
    axis: int = 1
    order: tuple[int, ...] = _IN_ORDER
    least_zero: int = 0

    def read(self, stored: Mapping[str, torch.Tensor], layer: str) -> QuantisedWeight:
        """Unpack a layer.

        Raises:
            ModelError: A tensor is missing, does not fit the others, or is not finite.
        """
        codes = self._codes(stored, layer)
        outputs, inputs = codes.shape
        rows = -(-outputs // (self.num_outputs or outputs))
        groups = -(-inputs // (self.group_size or inputs))

        def fitting(kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
            is_scalar = tensor.dim() < 2 and tensor.numel() == rows * groups
            if tensor.shape != (rows, groups) and not is_scalar:
                raise self._misfit(
                    layer,
                    f"its {kind} have shape {tuple(tensor.shape)}, and for {outputs} outputs and "
                    f"{inputs} inputs it must be {(rows, groups)}, each as (out, in)",
                )
            return tensor.reshape(rows, groups).contiguous()

        scales = fitting("scales", self._upright(stored, layer, "scales"))
        numbers = (scales, codes.float()) if self.floats else (scales,)
        if not (scales.is_meta or all(each.isfinite().all() for each in numbers)):
            raise self._misfit(layer, "its scales or codes are NaN or infinite")
        scales = scales.repeat_interleave(self.num_outputs or outputs, 0)[:outputs]
        zeros = None
        if not self.symmetric:
            zeros = self._zeros(self._upright(stored, layer, "zeros"), outputs)
            zeros = fitting("zeros", zeros)
        elif not self.packed:  # Packed ones of symmetric GPTQ do not count.
            unused = stored.get(f"{layer}.{self.names['zeros']}")
            if unused is not None and not unused.is_meta and unused.float().any():
                raise self._misfit(layer, f"{self.names['zeros']} must be 0 where it is symmetric")
        group = torch.arange(inputs) // (self.group_size or inputs)
        if (own := stored.get(f"{layer}.{self.group_of_input}")) is not None:
            group = own.long()
            if group.shape != (inputs,) or int(group.min()) < 0 or int(group.max()) >= groups:
                what = f"{self.group_of_input} must name one of {groups} groups for each"
                raise self._misfit(layer, f"{what} of {inputs} inputs")
        return QuantisedWeight(codes, scales, zeros, group, self.bits, self.least_zero)

    def _upright(self, stored: Mapping[str, torch.Tensor], layer: str, kind: Kind) -> torch.Tensor:
        """Return a tensor of a layer with its outputs first."""
        name = f"{layer}.{self.names[kind]}"
        if name not in stored:
            raise ModelError(f"model_name: the quantised checkpoint lacks {name}")
        tensor = stored[name]
        return tensor.T if self.transposed and tensor.dim() == 2 else tensor

    def _codes(self, stored: Mapping[str, torch.Tensor], layer: str) -> torch.Tensor:
        words = self._upright(stored, layer, "codes")
        byte = torch.float8_e4m3fn if self.floats else torch.int8
        dtype = torch.int32 if self.packed else byte
        if words.dtype != dtype or words.dim() != 2:
            what = f"{self.names['codes']} is {words.dtype} of shape {tuple(words.shape)}"
            raise self._misfit(layer, f"{what}, and must be {dtype} with two axes")
        if self.floats:
            return words
        if not self.packed:
            return (words.to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)
        codes = unpack(words, self.bits, self.axis, self.order)
        if "weight_shape" in self.others:  # The last word of a row may not be full.
            shape = stored.get(f"{layer}.weight_shape")
            if shape is None or shape.numel() != 2:
                raise self._misfit(layer, "its weight_shape must be two numbers")
            codes = codes[:, : int(shape.flatten()[1])]
        return codes.contiguous()

    def _zeros(self, zeros: torch.Tensor, outputs: int) -> torch.Tensor:
        if not self.packed:
            return zeros.to(torch.int16) + 2 ** (self.bits - 1)
        if zeros.dtype != torch.int32 or zeros.dim() != 2:  # `fitting` refuses it.
            return zeros
        unpacked = unpack(zeros, self.bits, 0, self.order)[:outputs]
        return unpacked.to(torch.int16) + self.least_zero

    def _misfit(self, layer: str, what: str) -> ModelError:
        return ModelError(
            f"model_name: the tensors of {layer} are not of one layer in the format "
            f"{self.format}, as config.json has it: {what}"
        )

    def stored(self, weight: QuantisedWeight, kind: Kind) -> torch.Tensor:
        """Return a parameter of a weight as the format stores it."""
        tensor = weight.parameters()[kind]
        if kind == "scales":
            pass
        elif not self.packed:
            tensor = (tensor.to(torch.int16) - 2 ** (self.bits - 1)).to(torch.int8)
        elif kind == "zeros":
            tensor = pack(tensor - self.least_zero, self.bits, 0, self.order)
        else:
            tensor = pack(tensor, self.bits, self.axis, self.order)
        return (tensor.T if self.transposed else tensor).contiguous()


@dataclasses.dataclass(frozen=True)
class _Checkpoint(QuantisedCheckpoint):
    """A checkpoint in one of the formats."""

    model_name: str
    layout: _Layout
    files: ReadTensors
    layers: tuple[str, ...]

    @property
    @override
    def packages(self) -> str:
        return _PACKAGES.get(self.layout.format.removesuffix("_v2"), "compressed-tensors")

    @override
    def weight(self, layer: str) -> QuantisedWeight:
        return self.layout.read(self.files, layer)

    @override
    def parameters(self) -> ReadTensors:
        kinds = [kind for kind in KINDS if kind != "zeros" or not self.layout.symmetric]
        names = (parameter_name(c, kind) for c in self.layers for kind in kinds)

        def read(name: str) -> torch.Tensor:
            layer, _, kind = name.rpartition(".")
            return self.weight(layer).parameters()[kind]

        return ReadTensors(() if self.layout.floats else dict.fromkeys(names), read)

    @override
    def outline(self, layer: str) -> QuantisedWeight:
        small = tuple(f"{layer}.{name}" for name in (self.layout.group_of_input, "weight_shape"))
        stored = {
            name: self.files[name] if name in small else self.files[name].to("meta")
            for name in self._stored_names(layer)
        }
        return self.layout.read(stored, layer)

    @override
    def plain(self, names: Collection[str], dtype: torch.dtype) -> ReadTensors:
        codes = self.layout.names["codes"]
        quantised = {f"{c}.weight": c for c in self.layers if f"{c}.{codes}" in names}

        def read(name: str) -> torch.Tensor:
            if name in quantised:
                return self.weight(quantised[name]).dequantised().to(dtype)
            tensor = self.files[name]
            if tensor.dtype.itemsize == 1:
                raise ModelError(
                    f"model_name: {name} is {tensor.dtype} and has no scales, which would be named "
                    f"*.{self.layout.names['scales']}"
                )
            return tensor

        parts = {name for layer in self.layers for name in self._stored_names(layer)}
        return ReadTensors({*names} - parts | quantised.keys(), read)

    def _stored_names(self, layer: str) -> list[str]:
        own = self.layout.names.values()
        suffixes = (*own, self.layout.group_of_input, *self.layout.others)
        return [name for suffix in suffixes if (name := f"{layer}.{suffix}") in self.files]

    @override
    def write(self, directory: Path, moved: Iterable[tuple[str, torch.Tensor]]) -> None:
        changed: dict[str, torch.Tensor] = {}
        for name, value in moved:
            layer, _, part = name.rpartition(".")
            kind = cast(Kind, part)
            weight = self.weight(layer).moved({kind: value.cpu()})
            place = f"{layer}.{self.layout.names[kind]}"
            shape = self.files[place].shape
            changed[place] = self.layout.stored(weight, kind).reshape(shape)
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


def open_checkpoint(model_name: str, settings: Mapping[str, object]) -> QuantisedCheckpoint:
    """Open a quantised checkpoint; its numbers are read when they are needed.

    Raises:
        ModelError: Its format is not a known one, or it cannot be read.
    """
    layout = _layout(model_name, settings)
    paths = weight_paths(model_name)
    if any(path.suffix != ".safetensors" for path in paths):
        raise ModelError(f"model_name: quantised weights must be in safetensors, found {paths[0]}")
    files = weight_files(paths)
    # Codes that are named like any weight are known by their scales.
    kinds: tuple[Kind, ...] = ("codes", "scales") if layout.packed else ("scales",)
    parts = [name.rpartition(".") for name in files]
    endings = [layout.names[kind] for kind in kinds]
    layers = dict.fromkeys(layer for layer, _, suffix in parts if suffix in endings)
    if not layers:
        raise ModelError(
            f"model_name: the config of {model_name!r} says that it is quantised as "
            f"{layout.format}, and its files have no tensor named *.{endings[0]}"
        )
    return _Checkpoint(model_name, layout, files, tuple(layers))


def unpack(
    words: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = _IN_ORDER
) -> torch.Tensor:
    """Unpack numbers of a few bits from 32-bit words, as uint8.

    `order` says which of eight are in a word from its lowest bits on.

    >>> unpack(torch.tensor([[0x21]], dtype=torch.int32), 4, axis=1).tolist()
    [[1, 2, 0, 0, 0, 0, 0, 0]]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    shape = [1] * (words.dim() + 1)
    shape[axis + 1] = -1
    numbers = (words.unsqueeze(axis + 1) >> shifts.view(shape)) & (2**bits - 1)
    numbers = numbers.to(torch.uint8).flatten(axis, axis + 1)
    if order == _IN_ORDER:
        return numbers
    places = torch.tensor(order, device=words.device).argsort()
    return numbers.unflatten(axis, (-1, 8)).index_select(axis + 1, places).flatten(axis, axis + 1)


def pack(
    numbers: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = _IN_ORDER
) -> torch.Tensor:
    """Undo `unpack`; a last word that is not full is filled with zeros.

    >>> pack(torch.tensor([[1, 2]]), 4, axis=1).tolist()
    [[33]]
    """
    per_word = 32 // bits
    numbers = numbers.to(torch.int64).movedim(axis, -1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    if order != _IN_ORDER:
        numbers = numbers.unflatten(-1, (-1, 8))[..., order].flatten(-2)
    shifts = torch.arange(0, 32, bits)
    words = (numbers.unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words)  # int32 is signed
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def _layout(model_name: str, how: Mapping[str, Any]) -> _Layout:
    read = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}
    try:
        found = read[how["quant_method"]](how)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        found = f"its settings cannot be read ({error})"
    if isinstance(found, str):
        raise ModelError(
            f"model_name: {model_name!r} is quantised, as quantization_config in its config.json "
            f"says, in a way that is not known here: {found}; {_ACCEPTED}"
        )
    return found


def _group(size: int | None) -> int:
    """Return how many inputs share a scale; -1 and None stand for all of an output."""
    return max(0, int(size or 0))


def _gptq(how: Mapping[str, Any]) -> _Layout | str:
    version = how.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        return f"its checkpoint_format is {version}"
    if how.get("bits") not in (2, 4, 8):
        return f"it has {how.get('bits')} bits"
    if how.get("dynamic"):
        return "its layers differ (dynamic)"
    return _Layout(
        format=version,
        names=_QWEIGHTS,
        bits=how["bits"],
        group_size=_group(how["group_size"]),
        symmetric=bool(how.get("sym", True)),
        transposed=True,
        least_zero=1 if version == "gptq" else 0,
    )


def _awq(how: Mapping[str, Any]) -> _Layout | str:
    version = str(how.get("version") or how.get("format") or "gemm").lower()
    if version != "gemm":
        return f"its version is {version}"
    bits = how.get("bits", how.get("w_bit"))
    if bits != 4:
        return f"it is awq of {bits} bits"
    return _Layout(
        format="awq",
        names=_QWEIGHTS,
        bits=bits,
        group_size=_group(how.get("group_size", how.get("q_group_size"))),
        symmetric=False,
        transposed=True,
        axis=0,
        order=_AWQ_ORDER,
    )


def _fp8(how: Mapping[str, Any]) -> _Layout | str:
    outputs, inputs = map(int, how.get("weight_block_size") or (0, 0))
    return _Layout(
        format="fp8",
        names={**_WEIGHTS, "scales": "weight_scale_inv"} if outputs else _WEIGHTS,
        bits=8,
        group_size=inputs,
        symmetric=True,
        packed=False,
        floats=True,
        num_outputs=outputs,
        others=("input_scale", "activation_scale"),
    )


def _compressed_tensors(how: Mapping[str, Any]) -> _Layout | str:
    for more in ("transform_config", "kv_cache_scheme"):
        if how.get(more):
            return f"it has a {more}"
    groups = cast("dict[str, dict[str, Any]]", how.get("config_groups") or {})
    if len(groups) != 1:
        return f"it has {len(groups)} config_groups"
    (group,) = groups.values()
    weights = cast("dict[str, Any]", group.get("weights") or {})
    form, number = str(how.get("format")), weights.get("type", "int")
    bits = cast(int, weights.get("num_bits"))
    if bits not in _BITS.get((form, number), ()):
        return f"its format is {form}, with {bits} bits of type {number}"
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    block = [*map(int, weights.get("block_structure") or (0, 0))]
    floats = number == "float"
    shares = {"channel": (1, 0), "group": (1, _group(size))}
    if floats:
        shares |= {"tensor": (0, 0)} | ({"block": (block[0], block[1])} if all(block) else {})
    if strategy not in shares:
        return f"its strategy is {strategy}"
    packed = form == "pack-quantized"
    return _Layout(
        format=form,
        names={**_WEIGHTS, "codes": "weight_packed"} if packed else _WEIGHTS,
        bits=bits,
        group_size=shares[strategy][1],
        symmetric=floats or bool(weights.get("symmetric", True)),
        packed=packed,
        floats=floats,
        num_outputs=shares[strategy][0],
        others=(*_OF_ACTIVATIONS, "weight_shape") if packed else _OF_ACTIVATIONS,
        group_of_input="weight_g_idx",
    )
