"""Judges' replies with known verdicts and marks: none counts for another, and most are read."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.judges.chat import AskAgainError
from es_cookbook.plugins.judges.judges import verdict_in
from es_cookbook.plugins.judges.reward import mark_in

VERDICTS = [
    *("{x}", "**{x}**", "[[{x}]]", r"\boxed{{{x}}}", "Answer {x}.", "Verdict: {x}"),
    *("The better answer is {x}.", "{y} has an error. So **{x}**.", "My choice: {x}"),
    *("I prefer {x}.", "Let me compare both.\n\n{x}", "The winner is {x}!"),
]
NEITHER = [
    *("A tie", "Neither {x} nor {y}.", "{x} and {y} are equal", "{x} is not better than {y}"),
    *("{x}?", "Not {x}", "{x}, {y}", "{x} or {y}", "{x}: 7, {y}: 9", "worse: {x}", ""),
    *("The weaker answer is {x}", "If {x} were longer, {x} would be better", "Loser: {x}"),
]


def read(parse: Callable[[], float]) -> float | None:
    try:
        return parse()
    except (AskAgainError, ESCookbookError):
        return None


@pytest.mark.parametrize(("x", "y"), [("A", "B"), ("B", "A")])
def test_only_a_reply_that_ends_in_a_verdict_has_one(x: str, y: str) -> None:
    for form in VERDICTS:
        assert verdict_in(form.format(x=x, y=y), ("A", "B")) == float(x == "A"), form
    for form in NEITHER:
        said = form.format(x=x, y=y)
        assert read(lambda said=said: verdict_in(said, ("A", "B"))) is None, form


MARKS: dict[str, Callable[[int, int], str]] = {
    "alone": lambda m, o: f"{m}",
    "bold": lambda m, o: f"**{m}**",
    "of best": lambda m, o: f"{m}/10",
    "out of": lambda m, o: f"I give it {m} out of 10.",
    "named": lambda m, o: f"Score: {m}",
    "bold name": lambda m, o: f"**Score:** {m}",
    "with points": lambda m, o: f"Rating: {m} points",
    "in words": lambda m, o: f"It deserves a {m}.",
    "json": lambda m, o: f'{{"score": {m}}}',
    "boxed": lambda m, o: rf"\boxed{{{m}}}",
    "reason": lambda m, o: f"It makes {o} mistakes.\n\nMark: {m}",
    "last line": lambda m, o: f"There are {o} steps, all of them right.\n{m}",
    "decimal": lambda m, o: f"Score: {m}.0",
    "after a list": lambda m, o: f"1. It is right.\n2. The answer is {o}.\n\nScore: {m}",
}
NO_MARKS: dict[str, Callable[[int, int], str]] = {
    "percent": lambda m, o: f"{m}%",
    "list": lambda m, o: f"{m}. It is right and clear.",
    "answer": lambda m, o: f"The answer is {m}.",
    "another best": lambda m, o: f"{m}/{o + 20}",
    "two": lambda m, o: f"Style: {m}/10, facts: {(m + 1) % 11}/10",
    "range": lambda m, o: f"{m}-{m + 1}",
    "or": lambda m, o: f"{m} or {m + 1}",
    "mistakes": lambda m, o: f"It has {o} mistakes.",
    "conditional": lambda m, o: f"I would give it {m} if it were shorter.",
    "too much": lambda m, o: f"Score: {m + 11}",
    "minus": lambda m, o: f"Score: -{m + 1}",
    "highest": lambda m, o: f"The highest mark is {m}.",
    "denied": lambda m, o: f"I do not give {m}",
    "time": lambda m, o: f"{m}:30",
    "sum": lambda m, o: f"Score: {m} + {o}",
    "changed": lambda m, o: f"Score: {m}. No, score: {(m + 1) % 11}",
    "thousands": lambda m, o: f"{m + 1},000",
    "version": lambda m, o: f"Score: {m}.{o}.1",
    "stars of five": lambda m, o: f"{m} out of 5 stars",
}


def test_no_reply_gives_another_mark_than_its_own() -> None:
    rng = random.Random(0)
    refused = Counter[str]()
    for kind, form in 5 * [*(MARKS | NO_MARKS).items()]:
        mark, other = rng.randint(0, 10), rng.randint(2, 9)
        said = form(mark, other)
        found = read(lambda said=said: mark_in(said, 10))
        assert found is None or (kind in MARKS and found == mark), said
        refused[kind] += found is None
    assert not [kind for kind in MARKS if refused[kind] > 1]
