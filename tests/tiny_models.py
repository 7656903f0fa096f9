"""Tiny random Hugging Face models with a character tokenizer, made on disk in milliseconds.

Small, but of real shape: grouped heads, tied and untied heads, biases, sliding windows shorter than
a test's sequences, soft caps, partial rotary positions. The end of sequence has a logit near 0: a
greedy sequence all but never ends by itself, and a hot one does after some tens of tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "gemma3", "gpt_neox")
"""Besides, there are "experts", of which a token takes two, and "all experts", which each takes."""
TinyModel: TypeAlias = Callable[[str], Path]
"""The fixture `tiny_model`: the directory of a model, by family."""
VOCABULARY = 40
PAD, EOS, BOS = 0, 1, 2
FIRST_CHARACTER = 3
"""Tokens from here on are one character each."""
CONTEXT = 192
WINDOW = 8

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
GROUPED = _SIZES | {"num_key_value_heads": 2}


def make_tiny_model(family: str, path: Path) -> Path:
    """Write a model of one of `FAMILIES` and its tokenizer, and return the path."""
    save_with_tokenizer(_build(family), path)
    return path


def new_model(architecture: str, **config: Any) -> PreTrainedModel:
    """Build a causal LM of transformers, which calls its architecture so in config.json."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config))


def save_with_tokenizer(
    model: PreTrainedModel, path: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    """Fill a model with seeded noise and write it, with a character tokenizer or another.

    Unless it is another, it knows all of the model's tokens: what it does not is never sampled.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
            else:  # Biases and norms, so that leaving one out shows.
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        model.get_output_embeddings().weight[EOS] = 0
    model.save_pretrained(path)
    size = model.get_input_embeddings().num_embeddings
    (tokenizer or character_tokenizer(size)).save_pretrained(path)


def character_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per character, from `-` on; decoding adds no spaces."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
    for token in range(FIRST_CHARACTER, size):
        vocabulary[chr(ord("-") + token - FIRST_CHARACTER)] = token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def _build(family: str) -> PreTrainedModel:
    match family:
        case "qwen2":
            return new_model("qwen2", **GROUPED, tie_word_embeddings=True)
        case "qwen3":
            return new_model("qwen3", **GROUPED, head_dim=16)
        case "experts" | "all experts":
            of_experts = {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32}
            chosen = 2 if family == "experts" else 4
            return new_model("qwen3_moe", **GROUPED, **of_experts, num_experts_per_tok=chosen)
        case "llama":
            return new_model("llama", **GROUPED)
        case "gemma2":
            return new_model(
                "gemma2",
                **GROUPED,
                head_dim=8,
                sliding_window=WINDOW,
                query_pre_attn_scalar=8,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=5.0,
            )
        case "gemma3":
            return new_model(
                "gemma3_text",
                **GROUPED,
                head_dim=8,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"],
                query_pre_attn_scalar=8,
            )
        case "gpt_neox":
            return new_model("gpt_neox", **_SIZES)
        case _:
            raise ValueError(f"no tiny model of family {family!r}, only of {FAMILIES}")
