"""Small models with the kinds of tokenizers that GGUF files have, and such files."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from es_cookbook.plugins.gguf.conversion import WHOLE_WORDS
from tests.tiny_models import GROUPED, new_model, save_with_tokenizer

TEXT = "hello world 12345 and it's 17 + 25 = 42, again and again"
MODELS = {
    "llama": "llama-bpe",
    "llama 3": "smollm",
    "llama with biases": "sentencepiece",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "gemma3": "sentencepiece",
    "linear": "gpt-2",
}
"""What can be made -> how its tokenizer splits text."""
CHAT_TEMPLATE = "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
_ROPE = {"rope_theta": 50_000.0}
_LLAMA_3 = _ROPE | {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}


def make_gguf_model(name: str, path: Path) -> Path:
    """Write one of `MODELS` with its tokenizer, as a directory, and return the path."""
    tokenizer = _sentencepiece() if MODELS[name] == "sentencepiece" else _byte_level(MODELS[name])
    tokenizer.chat_template = CHAT_TEMPLATE
    # Rows beyond the last token, as many real models have.
    save_with_tokenizer(_build(name, len(tokenizer) + 3), path, tokenizer)
    return path


def _build(name: str, vocab_size: int) -> PreTrainedModel:
    sizes: dict[str, Any] = GROUPED | {
        "vocab_size": vocab_size,
        "intermediate_size": 64,
        "max_position_embeddings": 16384,
    }
    match name:
        case "llama":
            return new_model("llama", **sizes, rope_parameters=_ROPE, tie_word_embeddings=True)
        case "llama 3":
            return new_model("llama", **sizes, rope_parameters=_LLAMA_3, head_dim=16)
        case "llama with biases":
            return new_model("llama", **sizes, attention_bias=True)
        case "linear":
            scaled = _ROPE | {"rope_type": "linear", "factor": 4.0}
            return new_model("llama", **sizes, rope_parameters=scaled)
        case "qwen2":
            return new_model("qwen2", **sizes, tie_word_embeddings=True)
        case "qwen3":
            return new_model("qwen3", **sizes, head_dim=16)
        case _:
            layers = sizes | {"num_hidden_layers": 6}
            scale = {"head_dim": 16, "query_pre_attn_scalar": 16}
            return new_model("gemma3_text", **layers, **scale, sliding_window=8)


def _byte_level(split: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(ignore_merges=split in WHOLE_WORDS))
    if split in GGUF_PRE_TOKENIZER_SPLITS:
        pattern = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[split]), "isolated")
        steps = [pattern, pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(True)] if split == "smollm" else []
        steps = [*digits, pre_tokenizers.ByteLevel(False)]
    one = len(steps) == 1
    tokenizer.pre_tokenizer = steps[0] if one else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=[*_SPECIAL.values()], initial_alphabet=alphabet
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL)


def _sentencepiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    replaced = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    special = [*_SPECIAL.values(), "<unk>", *in_bytes]
    _train(tokenizer, trainers.BpeTrainer(vocab_size=300, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **_SPECIAL)


def _train(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
