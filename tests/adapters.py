"""A small LoRA adapter with random factors, as PEFT makes and writes it."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def make_adapter(model: Path, path: Path, rank: int = 3) -> Path:
    """An adapter of q_proj, o_proj and down_proj; gives its path."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "o_proj", "down_proj"],
        init_lora_weights=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        get_peft_model(base, config).save_pretrained(path)
    return path
