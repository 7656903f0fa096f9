"""Tokens as the text of an answer, and where stop texts end it."""

import functools
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from es_cookbook.rl.messages.answer_texts import AnswerTexts
from tests.byte_tokenizers import byte_tokenizer

MARKS = ("<x>", "<yx>", "b")


@functools.cache
def texts() -> AnswerTexts:
    return AnswerTexts(byte_tokenizer(MARKS, ordinary=("c>",)))


def ends(found: AnswerTexts, tokens_T: list[int], stop: str) -> list[bool]:
    """Whether each token ends the answer."""
    return [found.is_ended(tokens_T[:n], (stop,)) for n in range(1, len(tokens_T) + 1)]


@pytest.mark.parametrize(
    ("said", "stop", "left"),
    [
        ("aé<x>é", "é", "a"),
        ("a<x>c", "<x>", "a"),
        ("a<x>c>", "c>", "a"),
        ("ab", "b", "a"),
        # A special token ends the answer, whatever the stop text has beside it.
        ("a<yx>c", "<yx>\n", "a"),
        ("ac", "<yx>\n", None),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_text(
    said: str, stop: str, left: str | None
) -> None:
    tokens_T = texts().tokenizer.encode(said)
    ended = ends(texts(), tokens_T, stop)
    assert any(ended) == (left is not None)
    if left is not None:
        text = texts().text(tokens_T[: ended.index(True) + 1])
        assert texts().before((stop,), text) == left


@pytest.mark.parametrize(("text", "said"), [("<x>1</x>", "1</x>"), ("e\u0301", "\u00e9")])
def test_said_texts_have_no_special_tokens_and_are_normalised(text: str, said: str) -> None:
    assert AnswerTexts(byte_tokenizer(MARKS, composes=True)).said(text) == said


@pytest.mark.parametrize("stop", ["é", "\n", "é b", "😀é"])
def test_a_stop_text_is_found_among_characters_that_are_bytes_whose_decoder_joins_them(
    stop: str,
) -> None:
    """Bytes of which the first are missing are all decoded to nothing readable there."""
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -2.0)]
    vocabulary += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokens_T = tokenizer.encode("a" + "😀" * 19 + "é ba\n😀é b", add_special_tokens=False)
    first = ends(AnswerTexts(tokenizer), tokens_T, stop).index(True)
    assert stop in tokenizer.decode(tokens_T[: first + 1])
    assert stop not in tokenizer.decode(tokens_T[:first])


@pytest.mark.parametrize("stop", ["a ", "x\n", "e" * 40])
def test_the_search_for_a_stop_text_costs_each_token_the_same_however_long_the_answer_is(
    stop: str,
) -> None:
    """Though its last character ends every other token."""
    tokenizer: Any = byte_tokenizer(MARKS)
    usual, num_decoded = tokenizer.decode, 0

    def counted(tokens: list[int], **how: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return str(usual(tokens, **how))

    tokenizer.decode = counted
    tokens_T = tokenizer.encode("e é<x>\n" * 100)
    found = AnswerTexts(tokenizer)
    assert not any(ends(found, tokens_T, stop))
    assert num_decoded < len(tokens_T) * 4 * (len(stop) + 8)
    assert found.is_ended(tokens_T + tokenizer.encode(stop), (stop,))
