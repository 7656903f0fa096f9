"""Tokens as the text of an answer, and where stop texts end it."""

import functools
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from es_cookbook.rl.messages.answer_texts import AnswerTexts
from tests.byte_tokenizers import byte_tokenizer

MARKS = ("<x>", "<yx>", "b")
PIECES = ("a", "é", "<", ">", "x", *MARKS, "c>")


@functools.cache
def texts() -> AnswerTexts:
    return AnswerTexts(byte_tokenizer(MARKS, ordinary=("c>",)))


@functools.cache
def tokens_of(piece: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer(MARKS, ordinary=("c>",)).encode(piece))


@st.composite
def ended_answers(draw: st.DrawFn) -> tuple[list[str], tuple[str, ...]]:
    """What is said, and stop texts, of which one is a part of it, begun and ended anywhere."""
    said = draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=10))
    whole = "".join(said)
    start = draw(st.integers(0, len(whole) - 1))
    end = draw(st.integers(start + 1, min(len(whole), start + 8)))
    others = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)
    return said, (whole[start:end], *draw(st.lists(others, max_size=1)))


def first_end(said: list[str], stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Of a stop text in what was said: after how many pieces it is there, and the text before it.

    By characters, of which each is known to be of a special token or not.
    """
    for count in range(1, len(said) + 1):
        marked = [(c, piece in MARKS) for piece in said[:count] for c in piece]
        plain = [each for each in marked if not each[1]]
        starts: list[str] = []
        for each in stop:
            mixed = each not in MARKS and any(mark in each for mark in MARKS)
            seen = marked if mixed else plain
            at = "".join(c for c, _ in seen).find(each)
            if at >= 0:
                starts.append("".join(c for c, is_special in seen[:at] if not is_special))
        if each_mark_is(said[count - 1], stop):
            starts.append("".join(c for c, _ in plain))
        if starts:
            return count, min(starts, key=len)
    return None


def each_mark_is(piece: str, stop: tuple[str, ...]) -> bool:
    return piece in MARKS and piece in stop


@given(ended_answers())
@example((["a", "c>", "<x>"], ("><x>",)))
@example((["a", "<yx>", "<x>"], ("x><x>",)))
def test_an_answer_ends_with_the_token_that_completes_a_stop_text_and_keeps_what_stands_before_it(
    answer: tuple[list[str], tuple[str, ...]],
) -> None:
    """Whatever mixes text and special tokens, in the answer and in the stop text."""
    said, stop = answer
    expected = first_end(said, stop)
    ended: int | None = None
    for count in range(1, len(said) + 1):
        # The last token of the last piece: bytes of an é alone complete nothing.
        if texts().is_ended([t for piece in said[:count] for t in tokens_of(piece)], stop):
            ended = count
            break
    assert ended == (expected and expected[0])
    tokens_T = [token for piece in said[:ended] for token in tokens_of(piece)]
    found = texts().before(stop, tokens_T, texts().text(tokens_T))
    whole = "".join(piece for piece in said[:ended] if piece not in MARKS)
    assert found == (whole if expected is None else expected[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [("<x>1</x>", "1</x>"), ("2 <yx> b", "2  "), ("e\u0301", "\u00e9"), ("\n\t ½", "\n\t ½")],
)
def test_what_a_model_says_is_without_special_tokens_and_in_its_tokenizers_letters(
    text: str, said: str
) -> None:
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
    tokens_T = tokenizer.encode("a" + "😀" * 9 + "é ba\n😀é b", add_special_tokens=False)
    texts = AnswerTexts(tokenizer)
    ended = [texts.is_ended(tokens_T[:n], (stop,)) for n in range(1, len(tokens_T) + 1)]
    first = ended.index(True)
    assert stop in tokenizer.decode(tokens_T[: first + 1])
    assert stop not in tokenizer.decode(tokens_T[:first])


def test_what_is_lost_of_a_text_is_told_with_what_helps() -> None:
    said = texts().lost_in("<x> and c> and <yx> and <x>")
    assert said.startswith("<x>, <yx> are special tokens of the model's tokenizer, and left out")
    assert 'make them ordinary there ("special": false in tokenizer.json' in said
    assert texts().lost_in("<x>").startswith("<x> is a special token of the model's tokenizer")
    assert texts().lost_in("c> e\u0301") == ""


@pytest.mark.parametrize("stop", ["a ", "x\n", "<x>x\n", "<x>é<x>", "e" * 40])
def test_the_search_for_a_stop_text_costs_each_token_the_same_however_long_the_answer_is(
    stop: str,
) -> None:
    """Though its last character ends every other token, or is a special token's."""
    tokenizer: Any = byte_tokenizer(MARKS)
    usual, num_decoded = tokenizer.decode, 0

    def counted(tokens: list[int], **how: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return str(usual(tokens, **how))

    tokenizer.decode = counted
    tokens_T = tokenizer.encode("e é<x>\n" * 100)
    found = AnswerTexts(tokenizer)
    assert not any(found.is_ended(tokens_T[:n], (stop,)) for n in range(1, len(tokens_T) + 1))
    assert num_decoded < len(tokens_T) * 4 * (len(stop) + 8)
    ended = tokens_T + tokenizer.encode(stop)
    assert found.is_ended(ended, (stop,))


@given(
    st.text("ab é", min_size=1, max_size=150), st.integers(0, 149), st.integers(1, 150), st.data()
)
def test_a_long_stop_text_ends_an_answer_with_the_token_that_completes_it(
    text: str, start: int, length: int, data: st.DataObject
) -> None:
    stop = (text * 3)[start % len(text) :][:length]
    said = data.draw(st.text("ab é", max_size=80)) + text * 4
    tokenizer = byte_tokenizer()
    tokens_T, found = tokenizer.encode(said), AnswerTexts(tokenizer)
    ended = [found.is_ended(tokens_T[:n], (stop,)) for n in range(1, len(tokens_T) + 1)]
    seen = [stop in found.text(tokens_T[:n]) for n in range(1, len(tokens_T) + 1)]
    # Behind its end nobody asks any more.
    assert ended[: seen.index(True) + 1] == seen[: seen.index(True) + 1]


@pytest.mark.parametrize(
    "stop",
    ["z" * 3000 + "e", "e" * 3000 + "z e", "e\n" * 3000 + "<x>e"],
    ids=["other", "alike", "marked"],
)
def test_a_long_stop_text_costs_no_more_than_a_short_one_where_it_is_not_about_to_end(
    stop: str,
) -> None:
    tokenizer: Any = byte_tokenizer(MARKS)
    usual, decoded = tokenizer.decode, list[int]()
    tokenizer.decode = lambda tokens, **how: (decoded.append(len(tokens)), usual(tokens, **how))[1]
    tokens_T = tokenizer.encode("e é<x>\n" * 1000)
    found = AnswerTexts(tokenizer)
    counts = range(len(tokens_T) - 300, len(tokens_T))
    assert not any(found.is_ended(tokens_T[:n], (stop,)) for n in counts)
    assert sum(decoded) < 100 * 300


def test_where_a_stop_text_with_special_tokens_begins_is_found_without_all_places_before() -> None:
    tokenizer: Any = byte_tokenizer(MARKS)
    usual, decoded = tokenizer.decode, list[int]()
    tokenizer.decode = lambda tokens, **how: (decoded.append(len(tokens)), usual(tokens, **how))[1]
    found, stop = AnswerTexts(tokenizer), "x" * 900 + "<x>"
    tokens_T = tokenizer.encode("é" * 50 + stop)
    assert found.before((stop,), tokens_T, found.text(tokens_T)) == "é" * 50
    assert len(decoded) < 50
