"""A small LoRA adapter with random factors, as PEFT makes and writes it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

LAYERS = ("q_proj", "o_proj", "down_proj")


def make_adapter(
    model: Path, path: Path, rank: int = 3, layers: Sequence[str] = LAYERS, seed: int = 0
) -> Path:
    """Make an adapter of these layers; returns its path."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(layers), init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        get_peft_model(base, config).save_pretrained(path)
    return path
