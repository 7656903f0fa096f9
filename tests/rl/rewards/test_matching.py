"""Answers that are texts: the row's own, the choice named last, and what fits a pattern."""

import itertools
import re
import time
import unicodedata
from collections.abc import Sequence
from typing import Literal

import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.rl.rewards.base import graded
from es_cookbook.rl.rewards.matching import (
    LONGEST_CHOICE,
    LONGEST_PATTERN,
    Choice,
    Exact,
    Regex,
    named_last,
)

CITIES = ["New York", "York", "Paris"]


@pytest.mark.parametrize(
    ("reward", "text", "answer", "score"),
    [
        (Exact(), "<answer> new\nYORK </answer>", "New York", 1),
        (Exact(), "New York.", "New York", 0),
        (Exact(), "straße", "STRASSE", 1),
        (Exact(), "two", ["2", "two"], 1),
        (Exact(fold_case=False), "york", "York", 0),
        (Exact(fold_spaces=False), "new York\n", "New York", 1),
        (Exact(extract="boxed"), r"York, \boxed{Paris}", "Paris", 1),
        (Exact(), "x" * 5000, "x" * 5000, 1),
        (Exact(), "x" + " " * 100_000 + "y", "x y", 0),
    ],
)
def test_exact(reward: Exact, text: str, answer: object, score: float) -> None:
    assert reward(text, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("answer", "choices", "position"),
    [
        ("B", CITIES, 1),
        (" (b). ", CITIES, 1),
        ("It is C.", CITIES, 2),
        ("Not (A) but **C**", CITIES, 2),
        ("new  york", CITIES, 0),
        ("I love new\nyork!", CITIES, 0),
        ("Paris, no, York", CITIES, 1),
        ("Paris is not in NEW YORK", CITIES, 0),
        ("", CITIES, None),
        ("5.2", ["5", "52"], None),
        ("-5", ["5", "-5"], 1),
        ("K", ["\N{KELVIN SIGN}elvin x", "Rankine"], None),
        ("kelvin it is", ["\N{KELVIN SIGN}elvin", "Rankine"], 0),
        ("B" + " x" * LONGEST_CHOICE, CITIES, None),
        ("aB" + "." * (LONGEST_CHOICE - 1), CITIES, None),
    ],
)
def test_the_choice_named_last(answer: str, choices: list[str], position: int | None) -> None:
    assert named_last(answer, choices) == position


def test_choices_of_letters_are_named_by_their_texts_alone() -> None:
    row = {"choices": ["B", "A"], "answer": 1}
    assert (Choice()("A", row), Choice()("B", row)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"choices": CITIES}, "field 'answer' is missing; the row has: choices"),
        ({"choices": ["x"], "answer": "A"}, "a list of 2 to 702 choices, found 1"),
        ({"choices": CITIES, "answer": "Rome"}, "found 'Rome'"),
        ({"choices": CITIES, "answer": 3}, "its position from 0 to 2, found 3"),
        ({"choices": ["x", "X"], "answer": "A"}, "texts that differ, found ['x', 'X']"),
    ],
)
def test_rows_that_ask_nothing_are_refused(row: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=re.escape(sentence)):
        Choice().check_row(row)


EVIL = r"(a+)+$"


@pytest.mark.parametrize(
    ("reward", "text", "row", "score"),
    [
        (Regex(pattern=r"\d{4}"), "In 1968.", {}, 1),
        (Regex(pattern=r"\d{4}", whole=True), "In 1968.", {}, 0),
        (Regex(pattern=r"\d{4}", whole=True), "<answer> 1968 </answer>", {}, 1),
        (Regex(), "PARIS", {"pattern": "(?i)paris"}, 1),
    ],
)
async def test_a_pattern_matches(
    reward: Regex, text: str, row: dict[str, object], score: float
) -> None:
    assert reward(text, row) == score
    assert (await graded(reward, text, row, "row 1")).reward == score


async def test_a_match_that_never_ends_is_told_in_a_sentence() -> None:
    start = time.monotonic()
    with pytest.raises(EnvError) as lost:
        await graded(Regex(timeout=0.2), "a" * 60 + "b", {"pattern": EVIL}, "row 1")
    assert str(lost.value) == (
        "row 1: reward 'regex': the pattern '(a+)+$' was not done after 0.2 s with an answer of 61 "
        "characters; write it without repeats inside of repeats"
    )
    assert time.monotonic() - start < 10
    assert (await graded(Regex(), "aaa", {"pattern": EVIL}, "row 1")).reward == 1.0


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        (
            "(",
            r"must be a regular expression \(missing \), unterminated subpattern at position 0\)",
        ),
        ("(" * LONGEST_PATTERN, "must be a regular expression"),
        ("x" * (LONGEST_PATTERN + 1), "must have at most 1000 characters, found 1,001"),
    ],
)
async def test_an_invalid_pattern_is_refused_before_it_runs(pattern: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Regex(pattern=pattern)
    with pytest.raises(DataError, match=sentence):
        Regex().check_row({"pattern": pattern})
    with pytest.raises(EnvError, match=sentence):
        await graded(Regex(), "x", {"pattern": pattern}, "row 1")


FORMS: Sequence[Literal["NFC", "NFD"]] = ("NFC", "NFD")


@pytest.mark.parametrize(("of_row", "of_answer"), [*itertools.product(FORMS, FORMS)])
def test_a_letter_and_its_accents_are_the_same_however_row_and_answer_write_them(
    of_row: Literal["NFC", "NFD"], of_answer: Literal["NFC", "NFD"]
) -> None:
    for letter, other in itertools.pairwise("éàñüçạ"):
        word, wrong = (unicodedata.normalize(of_row, f"x{each}y") for each in (letter, other))
        said = unicodedata.normalize(of_answer, f"so <answer>x{letter}y</answer>")
        for right, gold in ((1.0, word), (0.0, wrong)):
            row = {"answer": gold, "pattern": f"^{gold}$", "choices": [wrong, word]}
            assert [each(said, row) for each in (Exact(), Regex(), Choice())] == [right] * 3
        assert Exact().read(said, {}) == Exact().read(f"x{letter}y", {}), "attempts vote alike"
