"""PEFT LoRA adapters on the disk: read, and written as PEFT, transformers and vLLM load them.

The factors are written in float32, as the centre keeps them, for any dtype of the base:
they are small, and loaders cast them. Names are the weights' with `lora_A` and `lora_B`
in them.

Experts that share a parameter of three axes share one A and one B there (PEFT's
`target_parameters`): A is (experts · rank, in), expert after expert, and B (out, rank · experts),
with the experts of a rank beside each other. An expert without an adapter has zeros.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from es_cookbook.checkpoints.linear_weights import linear_weights, split_member
from es_cookbook.checkpoints.models import load_architecture
from es_cookbook.checkpoints.tensors import TensorFile
from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import ANY_SIZE, LARGEST_CONFIG, check_file, parsed, read_file
from es_cookbook.evolution.spaces.factors import LoRA, StoredAdapter, factor_names

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LARGEST = 10**6
"""Largest rank or alpha."""
_READ = ("r", "lora_alpha", "use_rslora", "target_parameters")
_WITHOUT_EFFECT = (
    # Where it comes from, and what it was trained for.
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "unsloth_fixed"),
    # For training alone.
    "lora_dropout",
    # Which layers have factors; the file of weights says it.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # PEFT corrects it for each layer by its class.
    "fan_in_fan_out",
    # Details of features that other, checked fields turn on.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
    "qalora_group_size",
)
"""Fields of PEFT's config that may have any value: A and B change the base alike."""
_PLAIN = {
    "peft_type": (None, "LORA"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
}
"""Field of PEFT's config -> values with which A and B are a change of the unchanged base.

All that is not named here is off if it is empty, also what later releases of PEFT add.
"""
_RENAMED = r".*\.(gate|gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
"""Layers beside experts that PEFT would take for those that became one parameter in transformers 5.

So it is given their weights as parameters, whose names it leaves alone.
"""


def read_adapter(path: Path, weights: Mapping[str, tuple[int, int]]) -> StoredAdapter:
    """Open an adapter in a directory, as PEFT wrote it; its factors are read when asked for.

    `weights` are (out, in), in the model's order.

    Raises:
        ModelError: It cannot be read, is not plain LoRA or rsLoRA, or adapts more than `weights`.
    """
    try:
        config = _checked_config(parsed(read_file(path / _CONFIG, LARGEST_CONFIG, None)))
        check_file(path / _WEIGHTS, ANY_SIZE, None)
        with safe_open(path / _WEIGHTS, "np") as file:  # pyright: ignore[reportUnknownVariableType]
            keys = cast(list[str], file.keys())
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"search_space: {str(path)!r} is no PEFT adapter: it needs {_CONFIG} and "
            f"{_WEIGHTS} ({error})"
        ) from error
    for field, value in config.items():
        if not _is_plain(field, value):
            raise ModelError(
                f"search_space: the adapter in {str(path)!r} has {field}={value!r:.60}, and "
                "only plain LoRA and rsLoRA can be perturbed; save it as such, in PEFT by "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...), merge it into "
                "the base, or, if A and B mean the same without it, remove the field from "
                f"{_CONFIG}"
            )
    if not stored:
        raise ModelError(f"search_space: {str(path / _WEIGHTS)!r} holds no tensors")
    lora = LoRA(config["r"], float(config["lora_alpha"]), bool(config.get("use_rslora")))
    targets = tuple(f".{each}" for each in config.get("target_parameters") or [])
    adapted: dict[str, tuple[int, int]] = {}
    for name, shape in weights.items():
        parameter, expert = split_member(name)
        is_targeted = expert is not None and f".{parameter}".endswith(targets)
        if is_targeted or f"{_PREFIX}{factor_names(name)[0]}" in stored:
            adapted[name] = shape
    needed = _stored_shapes(adapted, lora.rank, _num_experts(adapted))
    if needed != stored:
        wrong = sorted(needed.items() ^ stored.items())[0][0]
        raise ModelError(
            f"search_space: the adapter in {str(path)!r} does not fit the model's linear "
            f"weights, or what include, exclude and targets select of them: {wrong}"
        )
    return StoredAdapter(path, lora, adapted, partial(_read_factors, path, tuple(adapted)))


def _checked_config(config: object) -> dict[str, Any]:
    """Refuse fields that PEFT does not write, with half a sentence."""
    if not isinstance(config, dict):
        raise ValueError(f"{_CONFIG} must be an object, found {config!r:.60}")
    found = cast("dict[str, Any]", config)
    for name, kinds in (("r", {int}), ("lora_alpha", {int, float})):
        value = cast("float", found.get(name))
        if type(value) not in kinds or not 0 < value <= _LARGEST:
            raise ValueError(f"{_CONFIG}: {name} must be a number above 0, found {value!r:.60}")
    if not isinstance(rslora := found.get("use_rslora"), bool | None):
        raise ValueError(f"{_CONFIG}: use_rslora must be true or false, found {rslora!r:.60}")
    targets = found.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ValueError(f"{_CONFIG}: target_parameters must be names, found {targets!r:.60}")
    return found


def _is_plain(field: str, value: object) -> bool:
    """Return whether A and B alone say what an adapter with this field does to the base."""
    if field in _READ or field in _WITHOUT_EFFECT:
        return True
    value = value.lower() if field == "init_lora_weights" and isinstance(value, str) else value
    return value in _PLAIN.get(field, (None, False, "", [], {}))


def _read_factors(path: Path, weights: Sequence[str]) -> dict[str, torch.Tensor]:
    stored = {name: factor.float() for name, factor in load_file(path / _WEIGHTS).items()}
    keys, num_experts = _keys(weights), _num_experts(weights)
    factors: dict[str, torch.Tensor] = {}
    for weight in weights:
        parameter, expert = split_member(weight)
        a, b = (stored[key] for key in keys[parameter])
        if expert is not None:
            a = a.unflatten(0, (num_experts[parameter], -1))[expert]
            b = b.unflatten(1, (-1, num_experts[parameter]))[:, :, expert].contiguous()
        factors |= zip(factor_names(weight), (a, b), strict=True)
    return factors


def write_prompt(directory: Path, prompt: torch.Tensor, base: str) -> None:
    """Write a soft prompt, (tokens, hidden), as PEFT's prompt tuning of a base does."""
    save_file({"prompt_embeddings": prompt.contiguous()}, directory / _WEIGHTS)
    config: dict[str, object] = {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "num_virtual_tokens": len(prompt),
        "token_dim": prompt.shape[1],
        "num_transformer_submodules": 1,
        "inference_mode": True,
    }
    (directory / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_adapter(
    directory: Path,
    lora: LoRA,
    weights: Mapping[str, tuple[int, ...]],
    factors: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    model_name: str,
    base: str,
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into a directory.

    `weights` are (out, in), in the model's order. `factors` are name, A and B of each of them, in
    any order, and taken one at a time. The adapter is of a model that loaders find as `base`.
    """
    architecture = load_architecture(model_name)
    linear = linear_weights(architecture)
    num_experts, waiting = _num_experts(linear), _num_experts(weights)
    keys, shapes = _keys(weights), _stored_shapes(weights, lora.rank, num_experts)
    stacks: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    kinds = {key: (torch.float32, shape) for key, shape in shapes.items()}
    with TensorFile(directory / _WEIGHTS, kinds) as file:
        for weight, a, b in factors:
            parameter, expert = split_member(weight)
            if expert is not None:
                experts = num_experts[parameter]
                new = torch.zeros(experts, *a.shape), torch.zeros(*b.shape, experts)
                stack_a, stack_b = stacks.setdefault(parameter, new)
                stack_a[expert], stack_b[:, :, expert] = a, b
                waiting[parameter] -= 1
                if waiting[parameter]:
                    continue
                del stacks[parameter]
                a, b = stack_a.flatten(0, 1), stack_b.flatten(1)
            for key, factor in zip(keys[parameter], (a, b), strict=True):
                file.write(key, factor)
    modules = [name for name, _ in architecture.named_modules()]
    has_experts = any(".experts." in name for name, _ in architecture.named_parameters())
    renamed = [n for n in weights if has_experts and re.fullmatch(_RENAMED, n)]
    adapted = [
        name.removesuffix(".weight")
        for name in weights
        if split_member(name)[1] is None and name not in renamed
    ]
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": target_modules(adapted, modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(linear[n] for n in weights if split_member(n)[1] is None),
        "inference_mode": True,
    }
    if of_experts := [*_num_experts(weights), *renamed]:
        config["target_parameters"] = of_experts
    (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _num_experts(weights: Iterable[str]) -> Counter[str]:
    """Count the experts among these weights for each parameter that has any, in their order."""
    members = map(split_member, weights)
    return Counter(parameter for parameter, expert in members if expert is not None)


def _keys(weights: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Map each parameter that these weights are, or are part of, to PEFT's names of A and B.

    PEFT wraps a module of experts once for each of its parameters, the first of them innermost.
    """
    depths: dict[str, int] = {}
    modules: dict[str, str] = {}
    for weight in reversed(list(weights)):
        parameter, expert = split_member(weight)
        if parameter in modules:
            continue
        modules[parameter] = parameter
        if expert is not None:
            module = parameter.rpartition(".")[0]
            depths[module] = depth = depths.get(module, -1) + 1
            modules[parameter] = module + ".base_layer" * depth
    return {
        parameter: (f"{_PREFIX}{a}", f"{_PREFIX}{b}")
        for parameter, module in modules.items()
        for a, b in [factor_names(module)]
    }


def _stored_shapes(
    weights: Mapping[str, tuple[int, ...]], rank: int, num_experts: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the A and B of weights (out, in), by PEFT's names."""
    keys = _keys(weights)
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, (rows, columns) in weights.items():
        parameter, _ = split_member(weight)
        ranks = rank * num_experts.get(parameter, 1)
        shapes |= zip(keys[parameter], ((ranks, columns), (rows, ranks)), strict=True)
    return shapes


def target_modules(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """Return the last names of adapted modules, or full names where others end alike.

    >>> target_modules(["0.up", "1.up"], ["0.up", "0.down", "1.up", "1.down"])
    ['up']
    >>> target_modules(["1.up"], ["0.up", "0.down", "1.up", "1.down"])
    ['1.up']
    """
    last_names = {name.rpartition(".")[2] for name in adapted}
    matching = {name for name in modules if name.rpartition(".")[2] in last_names}
    return sorted(last_names if matching == set(adapted) else adapted)
