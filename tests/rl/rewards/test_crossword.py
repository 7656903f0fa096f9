"""Crossword answers: what is the same word, and that mentioning many words earns nothing."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.rl.rewards.crossword import (
    canonical,
    exact_reward,
    first_answer,
    letters,
    shaped_reward,
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("owl", "OWL"),
        ("Ice-cream", "ICECREAM"),
        ("Don’t", "DONT"),
        ("crème brûlée", "CREMEBRULEE"),
        ("Q & A", "QANDA"),
        ("Ｒ＆Ｂ", "RANDB"),
        ("ﬁne", "FINE"),
        ("Straße", "STRASSE"),
        ("7 up!", "UP"),
        ("", ""),
    ],
)
def test_canonical_form(text: str, form: str) -> None:
    assert canonical(text) == form


@given(st.text())
def test_canonical_form_is_letters_and_final(text: str) -> None:
    form = canonical(text)
    assert set(form) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert canonical(form) == form


def test_enumerations() -> None:
    assert [letters(text) for text in ("(5)", "3,4", "(2-3, 10)", "")] == [5, 7, 15, 0]


@pytest.mark.parametrize(
    ("text", "enumeration", "reward"),
    [
        ("<answer>Ice cream</answer>", None, 1.0),
        ("<answer>ICE-CREAM</answer>", "(3,5)", 1.0),
        ("<answer>ice cream</answer>", "(3,4)", 0.0),
        ("<answer>an ice cream</answer>", None, 0.0),
        ("<answer>owl</answer> or <answer>ice cream</answer>", None, 0.0),
        ("<answer>ice cream</answer> or <answer>owl</answer>", None, 1.0),
        ("<answer>ice cream", None, 0.0),
        ("ice cream", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_exact_is_the_first_answer_alone(text: str, enumeration: str | None, reward: float) -> None:
    assert exact_reward(text, "ice cream", enumeration) == reward


def test_first_answer() -> None:
    assert first_answer("<answer> a </answer><answer>b</answer>") == " a "
    assert first_answer("</answer><answer>a") is None


THOUGHT = "<think>hm</think>"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (f"{THOUGHT}<answer>ice cream</answer>", 1.0),
        (f"{THOUGHT}<answer>some ice-cream</answer>", 0.27),
        (f"{THOUGHT}<answer>cream</answer>", 0.0),
        (f"{THOUGHT}<answer>slice creams</answer>", 0.0),
        (f"{THOUGHT}<answer>nice cream</answer>", 0.0),
        ("it is ice cream", 0.25),
        ("<think>ice cream</think><answer>owl</answer>", 0.27),
        ("<think>ice cream</think>" + "so " * 78, 0.02 * 0.5),
        (THOUGHT + "so " * 200 + "<answer>an ice cream</answer>", 0.27),
        (THOUGHT + "<answer>" + "so " * 200 + "ice cream</answer>", 0.02),
    ],
)
def test_shaped_pays_little_for_what_is_nearly_there(text: str, reward: float) -> None:
    assert shaped_reward(text, "ice cream") == pytest.approx(reward)


def test_worth_of_mentioning_falls_from_25_words_to_none_at_80() -> None:
    texts = {count: "owl " + "so " * (count - 1) for count in (1, 25, 36, 58, 80, 81)}
    earned = {count: shaped_reward(text, "owl") / 0.25 for count, text in texts.items()}
    assert earned == pytest.approx({1: 1, 25: 1, 36: 0.8, 58: 0.4, 80: 0, 81: 0})


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "a " * 300_000, "<answer>" * 60_000, "é" * 300_000]
)
def test_hostile_text_costs_little(text: str) -> None:
    began = time.process_time()
    assert shaped_reward(text, "aaaaaaaaab", "(9)") == 0
    assert time.process_time() - began < 2


@given(st.text(alphabet="owl <answer>/thk&", max_size=60), st.text(max_size=5))
def test_rewards_are_between_0_and_1_and_exact_earns_all(text: str, solution: str) -> None:
    exact, shaped = exact_reward(text, solution), shaped_reward(text, solution)
    assert exact in (0, 1)
    assert exact <= shaped <= 1
    assert shaped < 0.28 or exact == 1
