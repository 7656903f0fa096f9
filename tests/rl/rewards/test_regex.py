"""Patterns match in a worker process; one that never ends loses its rollout and nothing else."""

import time

import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.rl.rewards.base import graded
from es_cookbook.rl.rewards.regex import LONGEST_PATTERN, Regex

pytestmark = pytest.mark.anyio
EVIL = r"(a+)+$"


@pytest.mark.parametrize(
    ("reward", "text", "row", "score"),
    [
        (Regex(pattern=r"\d{4}"), "In 1968.", {}, 1),
        (Regex(pattern=r"\d{4}", whole=True), "In 1968.", {}, 0),
        (Regex(pattern=r"\d{4}", whole=True), "<answer> 1968 </answer>", {}, 1),
        (Regex(pattern=r"1"), "1 <answer>2", {}, 0),
        (Regex(), "PARIS", {"pattern": "(?i)paris"}, 1),
        (Regex(field="form"), "aab", {"form": "^a*b$", "pattern": "x"}, 1),
        (Regex(pattern="x"), "y", {"pattern": "y"}, 0),
    ],
)
async def test_matches(reward: Regex, text: str, row: dict[str, object], score: float) -> None:
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
async def test_a_pattern_that_is_none_is_refused_before_it_runs(
    pattern: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Regex(pattern=pattern)
    with pytest.raises(DataError, match=sentence):
        Regex().check_row({"pattern": pattern})
    with pytest.raises(EnvError, match=sentence):
        await graded(Regex(), "x", {"pattern": pattern}, "row 1")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({}, "field 'pattern' is missing"),
        ({"pattern": 7}, "field 'pattern' must be a text, found 7"),
    ],
)
def test_rows_need_a_pattern(row: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Regex().check_row(row)
    Regex(pattern="x").check_row(row)
