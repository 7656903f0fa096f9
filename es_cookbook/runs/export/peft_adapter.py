"""A PEFT LoRA adapter on disk: what PEFT, transformers and vLLM load as it is.

The factors are written in float32, as the centre keeps them, whatever dtype the base is sampled in:
they are small, and whoever loads them casts them. Names are the weights' with `lora_A` and `lora_B`
in them; the config names the adapted modules by their last names where those mean exactly them, and
by their full names where they would mean more.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from es_cookbook.checkpoints.tensors import TensorFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    factors: Iterable[tuple[str, torch.Tensor]],
    settings: Mapping[str, object],
    modules: Collection[str],
    base_model: str,
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        directory: there already.
        shapes: name of a factor, "<module>.lora_A.weight" or B -> its shape.
        factors: all of them, with their names, in any order; taken one at a time.
        settings: r, lora_alpha and use_rslora.
        modules: names of all modules of the base model, adapted or not.
        base_model: what loaders are to put the adapter on.
    """
    kinds = {f"{PREFIX}{name}": (torch.float32, shape) for name, shape in shapes.items()}
    with TensorFile(directory / WEIGHTS, kinds) as file:
        for name, factor in factors:
            file.write(f"{PREFIX}{name}", factor)
    adapted = [name.partition(".lora_A.")[0] for name in shapes if ".lora_A." in name]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        **settings,
        "target_modules": target_modules(adapted, modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def factor_names(weight: str) -> tuple[str, str]:
    """A and B of a weight.

    >>> factor_names("lm_head.weight")
    ('lm_head.lora_A.weight', 'lm_head.lora_B.weight')
    """
    module = weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


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
