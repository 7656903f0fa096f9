"""Quantised checkpoints of tiny models, and the same models in plain numbers.

Rounded to the nearest, and packed here by a loop that has nothing of the package's: what it reads
is held against what was meant.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


@dataclasses.dataclass(frozen=True)
class How:
    """How to quantise.

    Attributes:
        format: gptq, or compressed-tensors' pack-quantized.
        bits: 4 or 8.
        group: inputs that share a scale.
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


def quantise(model: Path, quantised: Path, dequantised: Path, how: How = How()) -> None:
    """Write a checkpoint's projections in a few bits, and as what these bits stand for."""
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


def settings(how: How) -> dict[str, object]:
    """What config.json says of it."""
    if how.format == "gptq":
        return {
            "quant_method": "gptq",
            "bits": how.bits,
            "group_size": how.group,
            "desc_act": how.shuffled,
            "sym": how.symmetric,
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


def quantise_weight(weight: torch.Tensor, how: How) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One weight (out, in): its tensors by suffix, and the weight that they stand for."""
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
    if how.format == "gptq":
        return {
            "qweight": pack(codes.T, how.bits, 0),
            "qzeros": pack(zeros.T - 1, how.bits, 1),
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
    """Numbers of a few bits in 32-bit words along an axis, the first in the lowest bits."""
    rows = numbers.movedim(dim, 0).numpy().astype(np.uint32)
    per_word = 32 // bits
    words = np.zeros((-(-len(rows) // per_word), *rows.shape[1:]), np.uint32)
    for i, row in enumerate(rows):
        words[i // per_word] |= row << np.uint32(bits * (i % per_word))
    return torch.from_numpy(words.view(np.int32)).movedim(0, dim).contiguous()
