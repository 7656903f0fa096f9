"""The last number of a text, exactly."""

from fractions import Fraction

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.rewards.numbers import WINDOW


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("= -5", -5),
        ("= \N{MINUS SIGN}5", -5),
        ("3-5", None),
        ("x-5", None),
        ("-$1,234.50 or so", "-1234.5"),
        ("$12", 12),
        ("12,345,678", 12345678),
        ("1,23", None),
        ("1,2345", None),
        (".5", "1/2"),
        ("3.", 3),
        ("It is 3.", 3),
        ("3/4", "3/4"),
        ("1/0", None),
        ("2/4/2020", None),
        ("5e-3", "0.005"),
        ("007", 7),
        ("x2", None),
        ("7 \0 \ud800", 7),
        ("1" * WINDOW, 10**WINDOW // 9),
        ("1" * (WINDOW + 1), None),
        ("1," * WINDOW + "234", None),
        ("word " * WINDOW + "9", 9),
        ("1 " * WINDOW + "9", None),
    ],
)
def test_the_last_number(text: str, value: str | int | None) -> None:
    assert last_number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("so <answer>41</answer> not 42", "42", 0),
        ("42", "6 * 7 = 42\n#### 42", 1),
        ("0.0000005", 0, 1),
        ("0.333333", "1/3", 1),
        ("0.3333", "1/3", 0),
        ("1e-7", 1e-7, 1),
        ("25%", 25, 1),
        ("25%", "1/4", 1),
        ("25%", "0.25%", 0),
        ("5", "5%", 1),
        (r"so \boxed{3 or 4}", 4, 0),
        (r"so \boxed{3x}, or 4", 4, 0),
    ],
)
def test_within_the_tolerance(text: str, answer: object, score: float) -> None:
    assert Number()(text, {"answer": answer}) == score


@pytest.mark.parametrize(
    "gold", ["3 or 4", "about 5 (see p. 12)", "2^{10}", "10:45", "so 7", "1,5"]
)
def test_a_row_must_be_wholly_a_number(gold: str) -> None:
    with pytest.raises(DataError, match="field 'answer' must be wholly a number, found '"):
        Number().check_row({"answer": gold})
