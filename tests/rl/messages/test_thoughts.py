"""What a text says, apart from what it thinks, by the tags of many models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.rl.messages import thoughts
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from tests.byte_tokenizers import byte_tokenizer
from tests.chat_templates import CHATML, tokenizer_with

TAGS = [*thoughts.THOUGHTS, *thoughts.THOUGHTS.values()]
_texts = st.lists(st.sampled_from([*TAGS[:3], *TAGS[-3:], "a", "b\n", " ", "<", ">"])).map("".join)


@pytest.mark.parametrize(("start", "end"), thoughts.THOUGHTS.items())
def test_thoughts_of_each_model_are_not_said(start: str, end: str) -> None:
    assert thoughts.spoken(f"{start}\n4?\n{end}\n\nIt is 5.") == "It is 5."
    assert thoughts.spoken(f"{start}It may be 4") == ""
    assert thoughts.spoken(f"It may be 4{end}It is 5.") == "It is 5."
    assert thoughts.spoken(f"{end}It is 5.{start}or 6") == "It is 5."
    assert thoughts.spoken(f"Well. {start}4?{end}It is 5. {start}6?{end}") == "Well. \nIt is 5. "
    assert thoughts.spoken(f"{start}4? {start}5?{end}It is 5.") == "It is 5."


def test_a_text_without_thoughts_is_said_as_it_is() -> None:
    for text in ("", "\n  4\n", "a < b > c", "think> 4", "[THINK 4]"):
        assert thoughts.spoken(text) == text


@given(_texts)
def test_what_is_said_has_no_tag_and_is_a_part_of_the_text(text: str) -> None:
    said = thoughts.spoken(text)
    assert not any(tag in said for tag in thoughts.THOUGHTS)
    assert thoughts.spoken(said) == said
    spans = thoughts.said_spans(text)
    assert spans == sorted(spans) and all(start <= stop for start, stop in spans)
    assert len(said) <= len(text)


@pytest.mark.parametrize(
    ("end", "prefill", "opened"),
    [
        ("", "", ""),
        ("<think>\n", "", "<think>"),
        ("<think>\n\n</think>\n\n", "", ""),
        ("<think>\nI shall", "<think>\nI shall", "<think>"),
        ("<think>\nLet me see. ", "Let me see. ", "<think>"),
        ("<think>\nNo.</think>\n", "No.</think>\n", ""),
        ("<think>\n</Think >", "</Think >", ""),
        ("<think> is a tag. I", "I", ""),
        ("Use <think> and so on:", "", ""),
    ],
)
def test_a_prompt_tells_which_thought_it_has_opened(end: str, prefill: str, opened: str) -> None:
    tokenizer = tokenizer_with(CHATML)
    prompt_T = tokenizer.encode(f"1 + 2?{end}", add_special_tokens=False)
    assert thoughts.opened_thought(tokenizer, prompt_T, prefill) == opened


def test_tags_of_thoughts_are_in_the_text_of_answers_where_they_are_special_tokens() -> None:
    tags = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>")
    texts = AnswerTexts(byte_tokenizer(tags))
    for text in ("<think>3?</think>4", "[THINK]3?[/THINK]4", "3?</think>4"):
        assert texts.said(f"{text}<|end|>") == text and thoughts.spoken(text) == "4"
    final = "<|channel|>analysis<|message|>3?<|end|><|channel|>final<|message|>4<|end|>"
    assert thoughts.spoken(texts.said(final)) == "4"
    assert texts.said("<think>3?</think>4", ("</think>",)) == "<think>3?"
    tokens_T = byte_tokenizer(tags).encode("<think>3?</think>")
    assert texts.is_ended(tokens_T, ("</think>",)) and not texts.is_ended(
        tokens_T[:-1], ("</think>",)
    )


def test_an_opened_thought_is_closed_by_the_turn_or_is_all_of_it() -> None:
    assert thoughts.whole_turn("It is 4", "<think>") == "<think>It is 4"
    assert thoughts.spoken(thoughts.whole_turn("I say <think>4?</think>5", "<think>")) == "5"
    assert thoughts.spoken(thoughts.whole_turn("4?</think>5<think>6", "<think>")) == "5"
    assert thoughts.whole_turn("It is 4", "") == "It is 4"
    for text in ("4", "3?</think>4"):
        closed = thoughts.closed_turn(text, "<think>")
        assert thoughts.spoken(thoughts.whole_turn(closed, "<think>")) == "4"
