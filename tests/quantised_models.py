"""Quantised checkpoints of tiny models, and the same models in plain numbers.

Rounded to the nearest, and packed here by a loop that has nothing of the package's, or by the
library compressed-tensors: what is read is held against what was meant.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file


@dataclasses.dataclass(frozen=True)
class How:
    """How to quantise.

    Attributes:
        format: gptq, gptq_v2, awq, fp8, or compressed-tensors' pack-quantized.
        bits: 2, 4 or 8.
        group: inputs that share a scale; for fp8 the side of a block, 0 for one scale.
        symmetric: zero points all in the middle.
        dtype: of the model, and of the scales.
        shuffled: inputs belong to groups in no order, as GPTQ's `desc_act` has it.
    """

    format: str = "gptq"
    bits: int = 4
    group: int = 16
    symmetric: bool = True
    dtype: torch.dtype = torch.bfloat16
    shuffled: bool = False


@dataclasses.dataclass(frozen=True)
class ByLibrary:
    """What compressed-tensors' own compressor of a format makes of a weight, and undoes.

    Attributes:
        format: one of `CompressionFormat`.
        weights: fields of its `QuantizationArgs`.
        activations: those of the inputs.
        dtype: of the model, and of the scales where they are not of 8 bits.
    """

    format: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.weights["num_bits"]

    def scheme(self) -> Any:
        """Return the library's scheme."""
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        inputs = None if self.activations is None else QuantizationArgs(**self.activations)
        return QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(**self.weights), input_activations=inputs
        )

    def settings(self) -> dict[str, object]:
        """Return the entry of config.json as the library writes it."""
        from compressed_tensors.quantization import QuantizationConfig

        groups = {"group_0": self.scheme()}
        made = QuantizationConfig(
            config_groups=groups,
            format=self.format,
            ignore=["lm_head"],
            quantization_status="compressed",
        )
        return json.loads(made.model_dump_json())

    def quantise(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return tensors of a weight (out, in) by suffix, and the weight that they represent."""
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = self.scheme()
        strategy, size = scheme.weights.strategy, scheme.weights.group_size
        if strategy == "tensor":
            low, high = weight.amin().view(1), weight.amax().view(1)
        elif strategy == "block":
            rows, columns = scheme.weights.block_structure
            blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            groups = weight.unflatten(1, (-1, weight.shape[1] if strategy == "channel" else size))
            low, high = groups.amin(2), groups.amax(2)
        scales, zeros = calculate_qparams(low, high, scheme.weights)
        state = {
            "weight": weight,
            "weight_scale": scales.to(self.dtype),
            "weight_zero_point": zeros,
        }
        compressor: Any = BaseCompressor.get_value_from_registry(self.format)
        stored = compressor.compress(state, scheme)
        numbers = compressor.decompress(dict(stored), scheme)["weight"].to(self.dtype)
        if self.activations is not None and not self.activations.get("dynamic"):
            stored["input_scale"] = torch.tensor([0.02])
        return stored, numbers


def quantise(model: Path, quantised: Path, dequantised: Path, how: How | ByLibrary = How()) -> None:
    """Write a checkpoint with quantised projections, and one with the values they represent."""
    as_bits: dict[str, torch.Tensor] = {}
    as_numbers: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        as_bits[name] = as_numbers[name] = weight.to(how.dtype)
        if name.endswith("_proj.weight"):
            del as_bits[name]
            stored, as_numbers[name] = quantise_weight(weight, how)
            layer = name.removesuffix(".weight")
            as_bits |= {f"{layer}.{suffix}": tensor for suffix, tensor in stored.items()}
    config = json.loads((model / "config.json").read_text())
    config["dtype"] = str(how.dtype).removeprefix("torch.")
    for path, tensors, more in (
        (quantised, as_bits, {"quantization_config": settings(how)}),
        (dequantised, as_numbers, {}),
    ):
        shutil.copytree(model, path)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | more))


def settings(how: How | ByLibrary) -> dict[str, object]:
    """Return the entry of config.json."""
    if isinstance(how, ByLibrary):
        return how.settings()
    if how.format in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "checkpoint_format": how.format,
            "bits": how.bits,
            "group_size": how.group,
            "desc_act": how.shuffled,
            "sym": how.symmetric,
        }
    if how.format == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": how.bits,
            "group_size": how.group,
            "zero_point": True,
            "modules_to_not_convert": None,
        }
    if how.format == "fp8":
        block = [how.group, how.group]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if how.group else "static",
            **({"weight_block_size": block} if how.group else {}),
        }
    weights = {
        "num_bits": how.bits,
        "type": "int",
        "symmetric": how.symmetric,
        "strategy": "group",
        "group_size": how.group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def quantise_weight(
    weight: torch.Tensor, how: How | ByLibrary
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return tensors of a weight (out, in) by suffix, and the weight that they represent."""
    if isinstance(how, ByLibrary):
        return how.quantise(weight)
    if how.format == "fp8":
        return _as_fp8(weight, how)
    outputs, inputs = weight.shape
    group_of_input = torch.arange(inputs) // how.group
    if how.shuffled:
        group_of_input = group_of_input[torch.randperm(inputs, generator=torch.manual_seed(3))]
    order = group_of_input.argsort(stable=True)
    grouped = weight[:, order].view(outputs, -1, how.group)
    middle, most = 2 ** (how.bits - 1), 2**how.bits - 1
    if how.symmetric:
        scales = (grouped.abs().amax(2) / (middle - 1)).to(how.dtype)
        zeros = torch.full_like(scales, middle, dtype=torch.float32)
    else:
        low = grouped.amin(2).clamp(max=0)
        scales = ((grouped.amax(2).clamp(min=0) - low) / most).to(how.dtype)
        zeros = (-low / scales.float()).round().clamp(1, most)
    scale_of, zero_of = scales.float()[:, group_of_input], zeros[:, group_of_input]
    codes = (weight / scale_of + zero_of).round().clamp(0, most)
    numbers = ((codes - zero_of) * scale_of).to(how.dtype)
    if how.format == "awq":
        return {
            "qweight": pack(_awq_order(codes.T), how.bits, 1),
            "qzeros": pack(_awq_order(zeros.T), how.bits, 1),
            "scales": scales.T,
        }, numbers
    if how.format in ("gptq", "gptq_v2"):
        return {
            "qweight": pack(codes.T, how.bits, 0),
            "qzeros": pack(zeros.T - int(how.format == "gptq"), how.bits, 1),
            "scales": scales.T,
            "g_idx": group_of_input.to(torch.int32),
        }, numbers
    stored = {
        "weight_packed": pack(codes, how.bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not how.symmetric:
        stored["weight_zero_point"] = pack(zeros, how.bits, 0)
    return stored, numbers


def pack(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack numbers of a few bits into 32-bit words along an axis, the first in the lowest bits."""
    rows = numbers.movedim(dim, 0).numpy().astype(np.uint32)
    per_word = 32 // bits
    words = np.zeros((-(-len(rows) // per_word), *rows.shape[1:]), np.uint32)
    for i, row in enumerate(rows):
        words[i // per_word] |= row << np.uint32(bits * (i % per_word))
    return torch.from_numpy(words.view(np.int32)).movedim(0, dim).contiguous()


def _awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """Order columns as AutoAWQ packs them: of eight, first the even ones, then the odd ones."""
    eights = numbers.unflatten(1, (-1, 8))
    return torch.cat([eights[..., ::2], eights[..., 1::2]], -1).flatten(1)


def _as_fp8(weight: torch.Tensor, how: How) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantise to FP8 in blocks with a scale each, or with one scale and that of activations."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    if not how.group:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
        return stored, (codes.float() * scale).to(how.dtype)
    blocks = weight.unflatten(0, (-1, how.group)).unflatten(2, (-1, how.group))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    stored: dict[str, Any] = {"weight$": codes, "weight_scale_inv": scales}
    numbers: Any = Fp8Dequantize(None).convert(stored)["weight"]
    assert numbers.dtype == torch.float32
    return {"weight": codes, "weight_scale_inv": scales}, numbers.to(how.dtype)
