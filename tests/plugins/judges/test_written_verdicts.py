"""Judges' replies with known verdicts and marks: none counts for another, and most are read."""

import random
from collections import Counter
from collections.abc import Callable

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.judges.chat import AskAgainError
from es_cookbook.plugins.judges.judges import verdict_in
from es_cookbook.plugins.judges.reward import mark_in

VERDICTS = """
{x}|**{x}**|[[{x}]]|\\boxed{{{x}}}|Answer {x}.|{x} is better.|Answer {x} is better than answer {y}.
{y} is worse than {x}.|I prefer {x} to {y}.|I'd choose {x} over {y}|The better answer is {x}.
{y} is a bit weaker than {x}|{x} beats {y}|{y} loses to {x}|{y} is outperformed by {x}|{x} > {y}
{x} wins.|{x}, not {y}.|Not {y}, but {x}|{x} rather than {y}|Definitely {x}!
{x} or {y}? I'd say {x}.|{y} has an error, so {x}.|The winner is {x}|Ranking: {x} > {y}
{x} deserves to win|{y}: 4 points. {x}: 7 points. Verdict: {x}|{{"winner": "{x}"}}
{{"better": "{x}", "worse": "{y}"}}|{x} is the winner
{y} is good, but {x} is better|{x} is stronger, although {y} is shorter.|My choice: {x}
First {y} convinced me. Still, the final verdict is {x}|{y} looks nicer; {x} is correct.
The weaker answer is {y}.|{y} is the worse one.|Only {x} is right.|{y} is wrong. {x} is right.
The loser is {y}|{x} is more helpful.|Is {y} better? No, {x} is.|1. {x} 2. {y}|Ranking: {x}, {y}
{x} is less wrong than {y}|I rank {x} above {y}|My vote goes to {x}|worse: {y}|Worse answer: {y}
{y} is hardly the better answer: {x}.|{y} would be better without its error. {x} wins.
"""
NEITHER = """
A tie|Neither {x} nor {y}.|{x} and {y} are equal|{x} is not better than {y}
{x} isn't better than {y}|I cannot choose {x} or {y}|{x} is no better than {y}|{x}?
Is {x} better?|Would {x} win?|{x}: 7, {y}: 9|{x} would be better
If {x} were longer, {x} would be better|{x}, {y}|{x} {y}|Not {x}|Avoid {x}.|{x} is as good as {y}
Both {x} and {y} are fine|{x} has a mistake|Nobody would pick {x}
{x} or {y}|It depends|{x} is at least as good as {y}|I disagree that {x} is better|{x}: good
"""
AROUND = [
    "{}",
    "Let me compare both answers.\n\n{}",
    "Answer A says 42 and answer B says 41. {}",
    "One of them is correct: 6 * 7 = 42. {}",
    "{}\n",
    "> {}",
]


def forms(listed: str) -> list[str]:
    return [form for line in listed.strip().splitlines() for form in line.split("|")]


def read(parse: Callable[[], float]) -> float | None:
    try:
        return parse()
    except (AskAgainError, ESCookbookError):
        return None


def test_no_reply_counts_for_the_other_answer() -> None:
    rng = random.Random(0)
    refused, tried = Counter[str](), Counter[str]()
    known = dict.fromkeys(forms(VERDICTS), True) | dict.fromkeys(forms(NEITHER), False)
    for form, has_verdict in 6 * [*known.items()]:
        x, y = rng.sample(["A", "B"], 2)
        said = rng.choice(AROUND).format(form.format(x=x, y=y))
        found = read(lambda said=said: verdict_in(said, ("A", "B")))
        assert found is None or (has_verdict and found == float(x == "A")), said
        tried[form] += has_verdict
        refused[form] += found is None
    assert sum(refused[form] < tried[form] / 4 for form in known) >= 30


MARKS: dict[str, Callable[[int, int], str]] = {
    "alone": lambda m, o: f"{m}",
    "bold": lambda m, o: f"**{m}**",
    "of best": lambda m, o: f"{m}/10",
    "out of": lambda m, o: f"I give it {m} out of 10.",
    "named": lambda m, o: f"Score: {m}",
    "bold name": lambda m, o: f"**Score:** {m}",
    "with points": lambda m, o: f"Rating: {m} points",
    "in words": lambda m, o: f"It deserves a {m}.",
    "scale": lambda m, o: f"On a scale from 0 to 10, I rate this a {m}.",
    "json": lambda m, o: f'{{"score": {m}, "reason": "short"}}',
    "boxed": lambda m, o: rf"\boxed{{{m}}}",
    "reason": lambda m, o: f"It makes {o} mistakes.\n\nMark: {m}",
    "last line": lambda m, o: f"There are {o} steps, all of them right.\n{m}",
    "decimal": lambda m, o: f"Score: {m}.0",
    "percent": lambda m, o: f"{m * 10}%",
}
NO_MARKS: dict[str, Callable[[int, int], str]] = {
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
