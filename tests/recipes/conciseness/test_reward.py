"""Conciseness: minus the characters above, or below, the shortest good answer."""

import pytest

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.conciseness.reward import Conciseness


@pytest.mark.parametrize(
    ("text", "answer", "earned", "excess"),
    [
        (" Paris\n", "Paris", 0, 0),
        ("It is Paris.", "Paris", -7, 7),
        ("", "Paris", -5, -5),
        ("certainly", ["certainly", "yes"], -6, 6),
    ],
)
def test_conciseness_is_minus_the_difference_of_lengths(
    text: str, answer: object, earned: float, excess: float
) -> None:
    reward, metrics = Conciseness()(text, {"answer": answer})
    assert (reward, metrics["excess"], metrics["length"]) == (earned, excess, len(text.strip()))


@pytest.mark.parametrize(
    ("text", "answer", "correct", "concise"),
    [
        ("the answer is 42.", "42", 1, 0),
        ("paris", "Paris", 1, 1),
        ("certainly", ["yes", "certainly"], 1, 1),
        ("142", "42", 0, 0),
        ("42.5", "42", 0, 0),
        ("4.42", "42", 0, 0),
        ("-42", "42", 0, 0),
        ("-42", "-42", 1, 1),
        ("comparison", "paris", 0, 0),
    ],
)
def test_a_good_answer_stands_as_words_of_its_own(
    text: str, answer: object, correct: float, concise: float
) -> None:
    _, metrics = Conciseness()(text, {"answer": answer})
    assert (metrics["correct"], metrics["concise"]) == (correct, concise)


def test_an_answer_in_which_no_good_one_stands_may_cost_more() -> None:
    careful = Conciseness(wrong=20)
    assert careful("43", {"answer": "42"})[0] == -20
    assert careful("the answer is 42", {"answer": "42"})[0] == -14
    with pytest.raises(ConfigError, match="wrong must be 0 or more, found -1"):
        Conciseness(wrong=-1)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": []}, "must be a text, a number or a list of them"),
        ({"answer": ["x", " "]}, "field 'answer' must be text, and some, found only white space"),
    ],
)
def test_a_row_without_a_good_answer_is_refused(row: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError) as refused:
        Conciseness().check_row(row)
    assert sentence in str(refused.value)


def test_a_letter_and_its_accent_are_one_character() -> None:
    for answer, gold in (("cafe\u0301", "caf\u00e9"), ("Caf\u00e9", "cafe\u0301")):
        reward, metrics = Conciseness()(answer, {"answer": gold})
        assert (reward, metrics["concise"], metrics["length"]) == (0.0, 1.0, 4.0)
