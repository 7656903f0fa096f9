"""A model's linear weights rounded to 4 or 8 bits, written by compressed-tensors as vLLM reads it.

Every group of inputs of an output gets the scale at which its largest weight is the largest code,
and each weight the nearest code: no data, no calibration. GPTQ (arXiv:2210.17323) and AWQ
(arXiv:2306.00978) lose less at 4 bits, and need both. Layers are packed and the config is written
by the library `compressed-tensors` itself, in its format `pack-quantized`; floats of 8 bits in
`float-quantized`, as llm-compressor's FP8_DYNAMIC: vLLM rounds each token's activations too, which
has kernels on more processors than weights alone, and the torch engine does not.

Left out: layers other than `nn.Linear` (the `Conv1D` of GPT-2, fused experts), which the library
does not pack, and output heads, which vLLM wants whole.
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import linear_weights
from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer, no_progress_bar
from es_cookbook.checkpoints.quantised import is_quantised
from es_cookbook.common.errors import ConfigError, ModelError, not_installed
from es_cookbook.common.files import whole_directory
from es_cookbook.evolution.spaces.base import matching

if TYPE_CHECKING:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs

Dtype: TypeAlias = Literal["auto", "float16", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class _Copy:
    """What was written.

    Attributes:
        rounded: names of the rounded linear layers.
        left: the other linear layers -> the reason.
        num_bytes: size of the weights, the model's and the copy's.
    """

    rounded: tuple[str, ...]
    left: Mapping[str, str]
    num_bytes: tuple[int, int]


def write_rounded(
    model_name: str,
    output: Path,
    *,
    bits: int = 4,
    number: Literal["int", "float"] = "int",
    group_size: int | None = 32,
    symmetric: bool = True,
    dtype: Dtype = "auto",
    ignore: Collection[str] = (),
) -> _Copy:
    """Write a rounded copy of a model, with its tokenizer: whole, or not at all.

    Args:
        model_name: directory or Hub name.
        output: directory to make.
        bits: of a code.
        number: what a code is.
        group_size: inputs that share a scale; None: all of an output.
        symmetric: no zero points: codes reach as far below zero as above.
        dtype: of scales and of what is not rounded; auto: the model's, but bfloat16 for float32,
            which vLLM's kernels do not take.
        ignore: names of layers that stay as they are, or shell patterns of them.

    Raises:
        ConfigError: compressed-tensors is not installed, or no layer can be rounded so.
        ModelError: The model cannot be read, or is quantised already.
    """
    if find_spec("compressed_tensors") is None:  # Before minutes are spent.
        raise not_installed("quantise", "compressed-tensors", "es-cookbook[quantise]")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationType

    if is_quantised(model_name):
        raise ModelError(f"model_name: {model_name!r} is quantised already; give the whole model")
    tokenizer = load_tokenizer(model_name)
    model = load_causal_lm(model_name, "auto", torch.device("cpu"))
    rounded, left = _layers(model, group_size, ignore)
    before = _num_bytes(model)
    model.to(_dtype(model, dtype))  # pyright: ignore[reportArgumentType]
    arguments = QuantizationArgs(
        num_bits=bits,
        type=QuantizationType(number),
        symmetric=symmetric,
        group_size=group_size or -1,
    )
    compressor = _compress(model, rounded, arguments)
    with whole_directory(output) as directory:
        with no_progress_bar():
            model.save_pretrained(directory)
        compressor.update_config(str(directory))
        tokenizer.save_pretrained(directory)
    return _Copy(tuple(rounded), left, (before, _num_bytes(model)))


def _layers(
    model: PreTrainedModel, group_size: int | None, ignore: Collection[str]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Linear layers by name: those to round, and why the others are left as they are."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    names = [name.removesuffix(".weight") for name in linear_weights(model)]
    for pattern in ignore:
        if not any(matching(name, pattern) for name in names):
            near = ", ".join(difflib.get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.0))
            raise ConfigError(
                f"ignore={pattern} matches no linear layer; the nearest names are {near}"
            )
    head = cast("nn.Module | None", model.get_output_embeddings())
    left: dict[str, str] = {}
    for name in names:
        layer = modules.get(name)
        if layer is not None and layer is head:
            left[name] = "the output head"
        elif any(matching(name, pattern) for pattern in ignore):
            left[name] = "ignored"
        elif type(layer) is not nn.Linear:
            left[name] = "no nn.Linear"
        elif group_size is not None and layer.in_features % group_size:
            left[name] = f"group_size={group_size} does not divide {layer.in_features} inputs"
    rounded = {name: cast(nn.Linear, modules[name]) for name in names if name not in left}
    if not rounded:
        reasons = ", ".join(sorted(set(left.values()))) or "it has no linear layers"
        raise ConfigError(f"no layer of the model can be quantised: {reasons}")
    return rounded, left


def _compress(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Linear],
    arguments: "QuantizationArgs",
) -> "ModelCompressor":
    """Replace the layers' weights, in place, by codes and scales."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.base import compress_module
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        QuantizationStrategy,
        QuantizationType,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    form, inputs = CompressionFormat.pack_quantized, None
    if arguments.type == QuantizationType.FLOAT:
        form = CompressionFormat.float_quantized
        inputs = QuantizationArgs(
            num_bits=8, type=arguments.type, strategy=QuantizationStrategy.TOKEN, dynamic=True
        )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
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


def _dtype(model: PreTrainedModel, dtype: Dtype) -> torch.dtype:
    if dtype != "auto":
        return cast(torch.dtype, getattr(torch, dtype))
    return torch.bfloat16 if model.dtype == torch.float32 else model.dtype


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
