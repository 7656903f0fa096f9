"""Tiny models whose linear weights are not all `nn.Linear`'s, of sizes that vLLM on CPUs takes.

GPT-2's are all transposed (but an untied head). Qwen3-MoE has experts in parameters of three axes,
which its checkpoint stores one by one, Mixtral's under other names; GPT-OSS has transposed ones,
stored as they are.
"""

from pathlib import Path

from transformers import PreTrainedModel

from tests.tiny_models import BOS, EOS, PAD, VOCABULARY, new_model, save_with_tokenizer

LINEAR_FAMILIES = ("gpt2", "gpt2, untied", "qwen3_moe", "mixtral", "gpt_oss")
NUM_EXPERTS = 4
CONTEXT = 96

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
_SIZES = _TOKENS | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "num_experts_per_tok": 2,
}


def make_linear_model(family: str, path: Path) -> Path:
    """Write a model of one of `LINEAR_FAMILIES` and its tokenizer, and return the path."""
    save_with_tokenizer(_build(family), path)
    return path


def _build(family: str) -> PreTrainedModel:
    match family:
        case "gpt2" | "gpt2, untied":
            sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
            tied = family == "gpt2"
            return new_model("gpt2", **_TOKENS, **sizes, tie_word_embeddings=tied)
        case "qwen3_moe":
            experts = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 96}
            return new_model("qwen3_moe", **_SIZES, **experts)
        case "mixtral":
            experts = {"num_local_experts": NUM_EXPERTS, "intermediate_size": 96}
            return new_model("mixtral", **_SIZES, **experts)
        case "gpt_oss":
            experts = {"num_local_experts": NUM_EXPERTS, "intermediate_size": 96}
            return new_model("gpt_oss", **_SIZES, **experts, sliding_window=8)
        case _:
            raise ValueError(f"no model of family {family!r}, only of {LINEAR_FAMILIES}")
