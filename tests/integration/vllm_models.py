"""Tiny models that vLLM's CPU attention takes: heads of 32 dimensions."""

from pathlib import Path

from transformers import PreTrainedModel

from tests.tiny_models import GROUPED, new_model, save_with_tokenizer

CONTEXT = 96

_SIZES = GROUPED | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
}


def make_vllm_model(family: str, path: Path) -> Path:
    """Write a model of a family and its tokenizer; gives the path."""
    save_with_tokenizer(_build(family), path)
    return path


def _build(family: str) -> PreTrainedModel:
    match family:
        case "qwen2":
            return new_model("qwen2", **_SIZES | {"hidden_size": 128}, tie_word_embeddings=True)
        case "qwen3":
            return new_model("qwen3", **_SIZES, tie_word_embeddings=True)
        case "llama":
            return new_model("llama", **_SIZES)
        case _:
            raise ValueError(f"no model of family {family!r}")
