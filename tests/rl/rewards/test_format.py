"""Rewards for think and answer tags."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.rl.rewards.format import last_answer, paper_format_reward, tag_format_reward

GOOD = "<think>t</think><answer>a</answer>"
texts = st.lists(
    st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "\n", " ", "x"]), max_size=12
).map("".join)


@pytest.mark.parametrize(
    ("text", "points"),
    [
        (GOOD, 4),
        ("<think>t</think> so\n<answer>a</answer>", 4),
        ("t</think><answer>a</answer>", 3),
        ("<think><think>t</think><answer>a</answer>", 3),
        ("<think>t</think><answer>a</answer> done", 3),
        ("<think>t</think><answer>a</answer><answer>a</answer>", 2),
        ("<think>t<answer>a</answer>", 1),
        ("<answer>a</answer><think>t</think>", 1),
        ("", 0),
    ],
)
def test_one_point_a_tag_in_place(text: str, points: int) -> None:
    assert tag_format_reward(text) == points / 4


def test_excluded_tags_are_neither_expected_nor_looked_at() -> None:
    answer_only = ("think_open", "think_close")
    assert tag_format_reward("<answer>a</answer>", excluded=answer_only) == 1.0
    assert tag_format_reward("so </think></think><answer>a</answer>", excluded=answer_only) == 1.0
    assert tag_format_reward("<think>t</think>a", excluded=("answer_open", "answer_close")) == 1.0
    assert tag_format_reward("", excluded=("think_open", *answer_only, "answer_open")) == 0.0


def test_prompt_that_ends_in_think_expects_three_tags() -> None:
    assert tag_format_reward("t</think><answer>a</answer>", prompt_ends_in_think=True) == 1.0
    assert tag_format_reward("t</think><answer>a", prompt_ends_in_think=True) == 2 / 3


@given(texts)
def test_paper_reward_agrees_with_its_regular_expressions(text: str) -> None:
    whole = re.fullmatch(r"<think>.*?</think>\n<answer>.*?</answer>", text, re.DOTALL)
    thought = re.search(r"<think>.*?</think>", text, re.DOTALL)
    answer = re.search(r"<answer>.*?</answer>", text, re.DOTALL)
    expected = 1.0 if whole else 0.1 * bool(thought) + 0.5 * bool(answer)
    assert paper_format_reward(text) == pytest.approx(expected)


def test_paper_reward_puts_the_prompts_think_back() -> None:
    text = "t</think>\n<answer>a</answer>"
    assert paper_format_reward(text) == 0.5
    assert paper_format_reward(text, prompt_ends_in_think=True) == 1.0


@given(texts)
def test_answer_is_what_the_last_opening_tag_holds(text: str) -> None:
    answer = last_answer(text)
    last = re.fullmatch(r".*<answer>((?:(?!<answer>).)*?)</answer>(?:(?!<answer>).)*", text, re.S)
    assert answer == (last[1].strip() if last else None)
