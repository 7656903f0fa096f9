"""PEFT LoRA adapters on the disk: read, and written as PEFT, transformers and vLLM load them.

The factors are written in float32, as the centre keeps them, whatever dtype the base is sampled in:
they are small, and whoever loads them casts them. Names are the weights' with `lora_A` and `lora_B`
in them.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from es_cookbook.checkpoints.models import load_architecture
from es_cookbook.checkpoints.tensors import TensorFile
from es_cookbook.common.errors import ModelError
from es_cookbook.evolution.spaces.factors import LoRA, StoredAdapter, factor_names, factor_shapes

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Fields of PEFT's config that change what an adapter does, in ways that are not done here."""


def read_adapter(path: Path, weights: Mapping[str, tuple[int, int]]) -> StoredAdapter:
    """Open an adapter in a directory, as PEFT wrote it; its factors are read when asked for.

    Raises:
        ModelError: It cannot be read, is no plain LoRA or rsLoRA, or adapts more than `weights`.
    """
    try:
        config = cast(dict[str, Any], json.loads((path / _CONFIG).read_text()))
        with safe_open(path / _WEIGHTS, "np") as file:  # pyright: ignore[reportUnknownVariableType]
            keys = cast(list[str], file.keys())
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"search_space.start: {str(path)!r} is no PEFT adapter: it needs {_CONFIG} and "
            f"{_WEIGHTS} ({error})"
        ) from error
    for field in _UNSUPPORTED:
        if config.get(field):
            raise ModelError(
                f"search_space.start: the adapter in {str(path)!r} has {field}, and only plain "
                "LoRA and rsLoRA can be perturbed"
            )
    lora = LoRA(int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora")))
    adapted = {
        name: shape
        for name, shape in weights.items()
        if f"{_PREFIX}{factor_names(name)[0]}" in stored
    }
    needed = {_PREFIX + name: shape for name, shape in factor_shapes(adapted, lora.rank).items()}
    if needed != stored:
        wrong = sorted(needed.items() ^ stored.items())[0][0]
        raise ModelError(
            f"search_space.start: the adapter in {str(path)!r} does not fit the model's linear "
            f"weights, or what include, exclude and targets select of them: {wrong}"
        )
    return StoredAdapter(path, lora, adapted, partial(_read_factors, path))


def _read_factors(path: Path) -> dict[str, torch.Tensor]:
    stored = load_file(path / _WEIGHTS)
    return {name.removeprefix(_PREFIX): factor.float() for name, factor in stored.items()}


def write_adapter(
    directory: Path,
    lora: LoRA,
    weights: Mapping[str, tuple[int, ...]],
    factors: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    model_name: str,
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into a directory.

    `factors` are name, A and B of each of the weights, in any order, and taken one at a time.
    Loaders are to put the adapter on the base model of that name.
    """
    shapes = factor_shapes(weights, lora.rank)
    kinds = {f"{_PREFIX}{name}": (torch.float32, shape) for name, shape in shapes.items()}
    with TensorFile(directory / _WEIGHTS, kinds) as file:
        for weight, *pair in factors:
            for name, factor in zip(factor_names(weight), pair, strict=True):
                file.write(f"{_PREFIX}{name}", factor)
    modules = [name for name, _ in load_architecture(model_name).named_modules()]
    adapted = [name.removesuffix(".weight") for name in weights]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": location(model_name),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": target_modules(adapted, modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def location(model_name: str) -> str:
    """Where loaders find a model from any directory."""
    return str(Path(model_name).resolve()) if Path(model_name).is_dir() else model_name


def target_modules(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """The last names of the adapted modules, or their full names where others end so too.

    >>> target_modules(["0.up", "1.up"], ["0.up", "0.down", "1.up", "1.down"])
    ['up']
    >>> target_modules(["1.up"], ["0.up", "0.down", "1.up", "1.down"])
    ['1.up']
    """
    last_names = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in modules if name.rpartition(".")[2] in last_names}
    return sorted(last_names if meant == set(adapted) else adapted)
