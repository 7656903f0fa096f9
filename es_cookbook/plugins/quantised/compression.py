"""A model's linear weights rounded to 4 or 8 bits, written by compressed-tensors as vLLM reads it.

Every group of inputs of an output gets the scale at which its largest weight is the largest code,
and each weight the nearest code: no data, no calibration. GPTQ (arXiv:2210.17323) and AWQ
(arXiv:2306.00978) lose less at 4 bits, and need both. Layers are packed and the config is written
by the library `compressed-tensors` itself, in its format `pack-quantized`.

Left out: layers other than `nn.Linear` (the `Conv1D` of GPT-2, fused experts), which the library
does not pack, output heads, which vLLM needs unquantised, and FP8, which llm-compressor writes.
"""

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import linear_weights
from es_cookbook.checkpoints.models import (
    load_architecture,
    load_causal_lm,
    load_tokenizer,
    no_progress_bar,
)
from es_cookbook.checkpoints.quantised import is_quantised
from es_cookbook.common.errors import ConfigError, ModelError, not_installed
from es_cookbook.common.files import whole_directory

if TYPE_CHECKING:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A written copy.

    Attributes:
        rounded: names of the rounded linear layers.
        left: the other linear layers -> the reason.
        num_bytes: size of the weights, the model's and the copy's.
    """

    rounded: tuple[str, ...]
    left: Mapping[str, str]
    num_bytes: tuple[int, int]


def write_rounded(
    model_name: str, output: Path, bits: int, group_size: int | None, symmetric: bool
) -> _Copy:
    """Write a rounded copy of a model with its tokenizer, completely or not at all.

    Scales and unquantised weights have the model's dtype, but bfloat16 instead of float32, which
    vLLM's kernels do not support. The arguments are the options of `quantise`.

    Raises:
        ConfigError: compressed-tensors is not installed, or no layer can be rounded.
        ModelError: The model cannot be read, or is quantised already.
    """
    if find_spec("compressed_tensors") is None:  # Before minutes are spent.
        raise not_installed("quantise", "compressed-tensors", "es-cookbook[quantise]")
    from compressed_tensors.quantization import QuantizationArgs

    if is_quantised(model_name):
        raise ModelError(f"model_name: {model_name!r} is quantised already; give the whole model")
    tokenizer = load_tokenizer(model_name)
    _layers(load_architecture(model_name), group_size)  # Refuses before weights are read.
    model = load_causal_lm(model_name, "auto", torch.device("cpu"))
    rounded, left = _layers(model, group_size)
    before = _num_bytes(model)
    if model.dtype == torch.float32:
        model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    arguments = QuantizationArgs(num_bits=bits, symmetric=symmetric, group_size=group_size or -1)
    compressor = _compress(model, rounded, arguments)
    with whole_directory(output) as directory:
        with no_progress_bar():
            model.save_pretrained(directory)
        compressor.update_config(str(directory))
        tokenizer.save_pretrained(directory)
    return _Copy(tuple(rounded), left, (before, _num_bytes(model)))


def _layers(
    model: PreTrainedModel, group_size: int | None
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the linear layers to round, by name, and why the others are left as they are."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    names = [name.removesuffix(".weight") for name in linear_weights(model)]
    head = cast("nn.Module | None", model.get_output_embeddings())
    rounded: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for name in names:
        layer = modules.get(name)
        if layer is not None and layer is head:
            left[name] = "the output head"
        elif type(layer) is not nn.Linear:
            left[name] = "no nn.Linear"
        elif group_size is not None and layer.in_features % group_size:
            left[name] = f"group_size={group_size} does not divide {layer.in_features} inputs"
        else:
            rounded[name] = layer
    if not rounded:
        reasons = ", ".join(sorted(set(left.values()))) or "it has no linear layers"
        raise ConfigError(f"no layer of the model can be quantised: {reasons}")
    return rounded, left


def _compress(
    model: PreTrainedModel, layers: Mapping[str, nn.Linear], arguments: "QuantizationArgs"
) -> "ModelCompressor":
    """Replace the layers' weights, in place, by codes and scales."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.base import compress_module
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    form = CompressionFormat.pack_quantized
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    others = [
        name for name, m in model.named_modules() if type(m) is nn.Linear and name not in layers
    ]
    settings = QuantizationConfig(config_groups={"group_0": scheme}, ignore=others)
    apply_quantization_config(model, settings)
    for layer in layers.values():
        size = layer.in_features if arguments.group_size in (None, -1) else arguments.group_size
        groups = layer.weight.float().unflatten(1, (-1, size))
        scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
        layer.get_parameter("weight_scale").copy_(scales)
        if not arguments.symmetric:
            layer.get_parameter("weight_zero_point").copy_(zeros)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form.value)
    assert compressor.quantization_config is not None
    for layer in layers.values():
        compress_module(layer, form)  # `compress_model` does the same under a progress bar.
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    return compressor


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
