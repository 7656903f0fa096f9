"""Tokenizers that know every text, byte by byte, with special tokens of a test's choice."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    special: Sequence[str] = (), *, ordinary: Sequence[str] = (), composes: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte and per name; `composes`: texts are read in NFC."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {piece: token for token, piece in enumerate(pieces, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ordinary])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
