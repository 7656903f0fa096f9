"""Crossword answers: what is the same word, and that mentioning many words earns nothing."""

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.crossword.reward import LONGEST_TEXT, Crossword, canonical, enumeration_of


def shaped(text: str, solution: str) -> float:
    return Crossword()(text, {"answer": solution})[0]


@pytest.mark.parametrize(
    ("text", "form"), [("Don’t", "DONT"), ("ﬁne", "FINE"), ("Straße", "STRASSE"), ("7 up!", "UP")]
)
def test_canonical_form(text: str, form: str) -> None:
    assert canonical(text) == form


@pytest.mark.parametrize(
    ("text", "enumeration", "reward"),
    [
        ("<answer>Ice cream</answer>", None, 1.0),
        ("<answer>ICE-CREAM</answer>", "(3,5)", 1.0),
        ("<answer>ice cream</answer>", "(3,4)", 0.0),
        ("<answer>an ice cream</answer>", None, 0.0),
        ("<answer>owl</answer> or <answer>ice cream</answer>", None, 0.0),
        ("<answer>ice cream</answer> or <answer>owl</answer>", None, 1.0),
        ("ice cream", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_exact_is_the_first_answer_alone(text: str, enumeration: str | None, reward: float) -> None:
    row = {"answer": "ice cream", "enumeration": enumeration}
    assert Crossword(form="exact")(text, row)[0] == reward


THOUGHT = "<think>hm</think>"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (f"{THOUGHT}<answer>ice cream</answer>", 1.0),
        (f"{THOUGHT}<answer>some ice-cream</answer>", 0.27),
        (f"{THOUGHT}<answer>cream</answer>", 0.0),
        (f"{THOUGHT}<answer>slice creams</answer>", 0.0),
        ("it is ice cream", 0.25),
        ("<think>ice cream</think><answer>owl</answer>", 0.27),
        ("<think>ice cream</think>" + "so " * 78, 0.02 * 0.5),
        (THOUGHT + "so " * 200 + "<answer>an ice cream</answer>", 0.27),
        (THOUGHT + "<answer>" + "so " * 200 + "ice cream</answer>", 0.02),
    ],
)
def test_shaped_pays_little_for_what_is_nearly_there(text: str, reward: float) -> None:
    assert shaped(text, "ice cream") == pytest.approx(reward)


def test_worth_of_mentioning_falls_from_25_words_to_none_at_80() -> None:
    texts = {count: "owl " + "so " * (count - 1) for count in (1, 25, 36, 58, 80, 81)}
    earned = {count: shaped(text, "owl") / 0.25 for count, text in texts.items()}
    assert earned == pytest.approx({1: 1, 25: 1, 36: 0.8, 58: 0.4, 80: 0, 81: 0})


def test_of_a_long_text_the_end_is_searched() -> None:
    long = "so " * LONGEST_TEXT
    assert shaped(f"{long}<answer>owl</answer>", "owl") == 1
    assert shaped(f"{long}<answer>an owl</answer>", "owl") == 0.25
    assert shaped(f"<think>owl {long}", "owl") == 0


@pytest.mark.parametrize(
    ("row", "enumeration"),
    [
        ({"clue": "Cold", "enumeration": "(3,5)"}, "(3,5)"),
        ({"clue": "Cold (3-2,1'1) "}, "(3-2,1'1)"),
        ({"clue": "Cold (4)", "enumeration": 8}, "8"),
        ({"clue": "(3) men"}, None),
    ],
)
def test_an_enumeration_is_the_rows_or_stands_at_the_clues_end(
    row: dict[str, object], enumeration: str | None
) -> None:
    assert enumeration_of(row) == enumeration


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "123"}, "field 'answer' must have letters, found '123'"),
        ({"answer": "a", "enumeration": "(2)"}, "has 1 letter, its enumeration .2. asks for 2"),
        ({"answer": "owl", "enumeration": [3]}, r"must be such as '\(3,4\)', found \[3\]"),
    ],
)
def test_a_row_whose_answer_earns_nothing_is_refused(row: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Crossword().check_row(row)
