"""Files of quantised checkpoints: how each format stores a `CodesAndScales`.

A format is a `_Layout`: names of tensors, how numbers are packed, and what shares a scale.

- GPTQ, as AutoGPTQ and GPTQModel write it and vLLM reads it: `qweight` (in / n, out), `scales`
  (groups, out), `qzeros` (groups, out / n), `g_idx` (in). Its first version stores zero points less
  one; `checkpoint_format: gptq_v2` stores them as they are.
- AWQ, as AutoAWQ writes it in its version GEMM: `qweight` (in, out / 8), `scales`, `qzeros`, both
  packed along the outputs, of which 0, 2, 4, 6, 1, 3, 5, 7 are in a word from its lowest bits on.
- compressed-tensors, as its own compressors write it: `weight_packed`, or `weight` where a number
  has a byte of its own, `weight_scale`, `weight_zero_point`. Its whole numbers are signed, and have
  2^(bits - 1) added where they are packed, along the inputs, and zero points along the outputs.
- fp8, as transformers and vLLM read it: `weight` in float8_e4m3fn with `weight_scale_inv`, which
  multiplies all the same, for each block, or `weight_scale` for each tensor.

Elsewhere n = 32 / bits numbers are in a 32-bit word, the first in its lowest bits.

Left out: 3 bits, whose numbers cross words, other floats (FP4, MX, nf4, e5m2), and formats of one
kernel.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from safetensors.torch import save_file
from typing_extensions import override

from es_cookbook.checkpoints.model_files import copy_file, find_file, weight_paths
from es_cookbook.checkpoints.quantised import QuantisedCheckpoint, parameter_name
from es_cookbook.checkpoints.tensors import ReadTensors, weight_files
from es_cookbook.common.errors import ModelError
from es_cookbook.plugins.quantised.layers import KINDS, CodesAndScales, Kind, layer_and_kind

_ACCEPTED = (
    "accepted are gptq with 2, 4 or 8 bits, awq in the version gemm with 4 bits, fp8, and "
    "compressed-tensors with one group of settings in the formats pack-quantized, int-quantized, "
    "float-quantized and naive-quantized"
)
_ALSO_COPIED = ("config.json", "generation_config.json", "model.safetensors.index.json")
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_Numbers: TypeAlias = Literal["words", "int8", "float8"]
_GPTQ_PACKAGES = "gptqmodel and optimum"
_PACKAGES = {"gptq": _GPTQ_PACKAGES, "gptq_v2": _GPTQ_PACKAGES, "awq": "gptqmodel"}
"""Format -> what transformers needs to load it, where that is not compressed-tensors."""
_STORED_AS: Mapping[_Numbers, torch.dtype] = {
    "words": torch.int32,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
_BYTES = {torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
_STORED: Mapping[tuple[object, object], tuple[_Numbers, tuple[int, ...]]] = {
    ("pack-quantized", "int"): ("words", (2, 4, 8)),
    ("int-quantized", "int"): ("int8", (4, 8)),
    ("naive-quantized", "int"): ("int8", (4, 8)),
    ("float-quantized", "float"): ("float8", (8,)),
    ("naive-quantized", "float"): ("float8", (8,)),
}
"""compressed-tensors' format and type -> how codes are stored, and bits."""
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How a format stores a layer.

    Attributes:
        format: as config.json calls it.
        names: suffix of the tensor that has the codes, the scales, the zero points.
        numbers: how codes are stored: some in a 32-bit word, or one in a byte.
        shares: outputs and inputs that share a scale; 0 is all of them.
        symmetric: no zero points, or none that count.
        others: suffixes of tensors that are no weights of the model either.
        group_of_input: suffix of the tensor that says which group each input is in.
        transposed: whether inputs come before outputs.
        axis: along which codes are packed in words: 0 is outputs, 1 inputs.
        order: of the numbers in eight places of a word.
        least_zero: the zero point that is stored as 0.
    """

    format: str
    names: Mapping[Kind, str]
    numbers: _Numbers
    bits: int
    shares: tuple[int, int]
    symmetric: bool
    others: tuple[str, ...] = ()
    group_of_input: str = "g_idx"
    transposed: bool = False
    axis: int = 1
    order: tuple[int, ...] = _IN_ORDER
    least_zero: int = 0

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of all tensors of a layer."""
        return (*self.names.values(), self.group_of_input, *self.others)

    @property
    def kinds(self) -> list[Kind]:
        """Parameters that search spaces may move."""
        if self.numbers == "float8":
            return []
        return [kind for kind in KINDS if kind != "zeros" or not self.symmetric]

    def read(self, stored: Mapping[str, torch.Tensor], layer: str) -> CodesAndScales:
        """Unpack a layer.

        Raises:
            ModelError: A tensor is missing, does not fit the others, or is not finite.
        """

        def get(suffix: str) -> torch.Tensor:
            name = f"{layer}.{suffix}"
            if name not in stored:
                raise ModelError(f"model_name: the quantised checkpoint lacks {name}")
            return stored[name]

        def upright(kind: Kind) -> torch.Tensor:
            tensor = get(self.names[kind])
            return tensor.T if self.transposed and tensor.dim() == 2 else tensor

        words = upright("codes")
        if words.dtype != _STORED_AS[self.numbers] or words.dim() != 2:
            raise ModelError(
                f"model_name: {layer}.{self.names['codes']} is {words.dtype} of shape "
                f"{tuple(words.shape)}, and {self.format}, as config.json has it, stores "
                f"{_STORED_AS[self.numbers]} with two axes"
            )
        codes = self._codes(words)
        if "weight_shape" in self.others:
            codes = codes[:, : int(get("weight_shape")[1])].contiguous()
        outputs, inputs = codes.shape
        rows, groups = (
            -(-n // (share or n)) for n, share in zip(codes.shape, self.shares, strict=True)
        )

        def fitting(kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape != (rows, groups) and not (
                tensor.dim() < 2 and tensor.numel() == rows * groups
            ):
                raise ModelError(
                    f"model_name: the tensors of {layer} are not of one layer in the format "
                    f"{self.format}, as config.json has it: its {kind} have shape "
                    f"{tuple(tensor.shape)}, and for {outputs} outputs and {inputs} inputs "
                    f"it must be {(rows, groups)}, each as (out, in)"
                )
            return tensor.reshape(rows, groups).contiguous()

        scales = fitting("scales", self._scales(layer, upright("scales")))
        if not scales.is_meta and not (scales.isfinite().all() and _is_finite(codes)):
            raise ModelError(f"model_name: scales or codes of {layer} are NaN or infinite")
        zeros = None
        if not self.symmetric:
            zeros = fitting("zeros", self._zeros(upright("zeros"), rows))
        elif self._has_zeros(stored, layer):
            raise ModelError(
                f"model_name: {layer}.{self.names['zeros']} is not 0, and config.json says that "
                "there are no zero points (symmetric)"
            )
        group = torch.arange(inputs) // (self.shares[1] or inputs)
        if (own := stored.get(f"{layer}.{self.group_of_input}")) is not None:
            group = own.long()
            if group.shape != (inputs,) or int(group.min()) < 0 or int(group.max()) >= groups:
                raise ModelError(
                    f"model_name: {layer}.{self.group_of_input} must name one of {groups} groups "
                    f"for each of {inputs} inputs"
                )
        row = torch.arange(outputs) // (self.shares[0] or outputs)
        return CodesAndScales(codes, scales, zeros, row, group, self.bits, self.least_zero)

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        match self.numbers:
            case "words":
                return unpack(words, self.bits, self.axis, self.order).contiguous()
            case "int8":
                return (words.to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)
            case "float8":
                return words

    def _has_zeros(self, stored: Mapping[str, torch.Tensor], layer: str) -> bool:
        """Whether zero points are stored that count; packed ones of symmetric GPTQ do not."""
        zeros = stored.get(f"{layer}.{self.names['zeros']}")
        if zeros is None or zeros.is_meta or self.numbers == "words":
            return False
        return bool(zeros.float().any())

    def _scales(self, layer: str, scales: torch.Tensor) -> torch.Tensor:
        if scales.dtype not in _SCALE_DTYPES:
            raise ModelError(
                f"model_name: the scales of {layer} are {scales.dtype}, and {self.format}, as "
                "config.json has it, stores float16, bfloat16 or float32"
            )
        return scales

    def _zeros(self, zeros: torch.Tensor, rows: int) -> torch.Tensor:
        if self.numbers == "int8":
            return zeros.to(torch.int16) + 2 ** (self.bits - 1)
        if zeros.dtype != torch.int32 or zeros.dim() != 2:  # what shape it must have, is said then
            return zeros
        return unpack(zeros, self.bits, 0, self.order)[:rows].to(torch.int16) + self.least_zero

    def stored(self, weight: CodesAndScales, kind: Kind) -> torch.Tensor:
        """One of a weight's parameters as the format stores it."""
        if kind == "scales":
            tensor = weight.scales
        elif self.numbers == "int8":
            tensor = (weight.parameters()[kind].to(torch.int16) - 2 ** (self.bits - 1)).to(
                torch.int8
            )
        elif kind == "zeros":
            assert weight.zeros is not None, "a symmetric format stores no zero points"
            tensor = pack(weight.zeros - self.least_zero, self.bits, 0, self.order)
        else:
            tensor = pack(weight.codes, self.bits, self.axis, self.order)
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
        return _PACKAGES.get(self.layout.format, "compressed-tensors")

    @override
    def weight(self, layer: str) -> CodesAndScales:
        return self.layout.read(self.files, layer)

    @override
    def parameters(self) -> ReadTensors:
        places: dict[str, tuple[str, Kind]] = {
            parameter_name(layer, kind): (layer, kind)
            for layer in self.layers
            for kind in self.layout.kinds
        }

        def read(name: str) -> torch.Tensor:
            layer, kind = places[name]
            return self.weight(layer).parameters()[kind]

        return ReadTensors(places, read)

    @override
    def outline(self, layer: str) -> CodesAndScales:
        small = (self.layout.group_of_input, "weight_shape")
        numbers = {f"{layer}.{suffix}" for suffix in self.layout.suffixes if suffix not in small}
        stored = {
            name: self.files[name].to("meta") if name in numbers else self.files[name]
            for name in self._stored_names(layer)
        }
        return self.layout.read(stored, layer)

    @override
    def plain(self, names: Collection[str], dtype: torch.dtype) -> ReadTensors:
        part_of = {name: layer for layer in self.layers for name in self._stored_names(layer)}
        codes = self.layout.names["codes"]
        quantised = {
            f"{part_of[name]}.weight": part_of[name]
            for name in names
            if name in part_of and name == f"{part_of[name]}.{codes}"
        }

        def read(name: str) -> torch.Tensor:
            if name in quantised:
                return self.weight(quantised[name]).dequantised().to(dtype)
            tensor = self.files[name]
            if tensor.dtype in _BYTES:
                raise ModelError(
                    f"model_name: {name} is {tensor.dtype} and has no scales, which would be named "
                    f"*.{self.layout.names['scales']}"
                )
            return tensor

        others = [name for name in names if name not in part_of]
        return ReadTensors({*others, *quantised}, read)

    def _stored_names(self, layer: str) -> list[str]:
        names = (f"{layer}.{suffix}" for suffix in self.layout.suffixes)
        return [name for name in names if name in self.files]

    @override
    def write(self, directory: Path, moved: Iterable[tuple[str, torch.Tensor]]) -> None:
        changed: dict[str, torch.Tensor] = {}
        for name, value in moved:
            layer, kind = layer_and_kind(name)
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
    """Open a quantised checkpoint; its numbers are read when they are asked for.

    Raises:
        ModelError: Its format is another than the known ones, or it cannot be read.
    """
    layout = _layout(model_name, settings)
    paths = weight_paths(model_name)
    if any(path.suffix != ".safetensors" for path in paths):
        raise ModelError(f"model_name: quantised weights must be in safetensors, found {paths[0]}")
    files = weight_files(paths)
    # Codes that are named like any weight are known by their scales.
    kinds: tuple[Kind, ...] = (
        ("scales",) if layout.names["codes"] == "weight" else ("codes", "scales")
    )
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
    """Numbers of a few bits out of 32-bit words, as uint8.

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
    """The inverse of `unpack`; a last word that is not full is filled with zeros.

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


def _is_finite(codes: torch.Tensor) -> bool:
    """Whether no float is NaN: all bits but the sign, of this type, which has no infinity."""
    if not codes.is_floating_point():
        return True
    return not bool(((codes.view(torch.uint8) & 127) == 127).any())


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


def _group(size: int | None) -> tuple[int, int]:
    """Outputs and inputs that share a scale; -1 or None: all inputs of an output."""
    return 1, max(0, int(size or 0))


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
        names={"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
        numbers="words",
        bits=how["bits"],
        shares=_group(how["group_size"]),
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
        names={"codes": "qweight", "scales": "scales", "zeros": "qzeros"},
        numbers="words",
        bits=bits,
        shares=_group(how.get("group_size", how.get("q_group_size"))),
        symmetric=False,
        transposed=True,
        axis=0,
        order=_AWQ_ORDER,
    )


def _fp8(how: Mapping[str, Any]) -> _Layout | str:
    outputs, inputs = how.get("weight_block_size") or (0, 0)
    return _Layout(
        format="fp8",
        names={
            "codes": "weight",
            "scales": "weight_scale_inv" if outputs else "weight_scale",
            "zeros": "weight_zero_point",
        },
        numbers="float8",
        bits=8,
        shares=(outputs, inputs),
        symmetric=True,
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
    form, bits, number = how.get("format"), weights.get("num_bits"), weights.get("type", "int")
    stored = _STORED.get((form, number))
    if stored is None or bits not in stored[1]:
        return f"its format is {form}, with {bits} bits of type {number}"
    block = weights.get("block_structure") or (0, 0)
    size = weights.get("group_size")
    shares = {
        "tensor": (0, 0),
        "channel": _group(None),
        "group": _group(size),
        "block": (block[0], block[1]),
    }
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    if strategy not in shares or (strategy == "block" and not all(block)):
        return f"its strategy is {strategy}"
    if stored[0] == "words" and shares[strategy][0] != 1:
        return f"its strategy is {strategy}, with several numbers in a word"
    packed = stored[0] == "words"
    return _Layout(
        format=str(form),
        names={
            "codes": "weight_packed" if packed else "weight",
            "scales": "weight_scale",
            "zeros": "weight_zero_point",
        },
        numbers=stored[0],
        bits=bits,
        shares=shares[strategy],
        symmetric=stored[0] == "float8" or bool(weights.get("symmetric", True)),
        others=(*_OF_ACTIVATIONS, *(("weight_shape",) if packed else ())),
        group_of_input="weight_g_idx",
    )
