"""Which answer a model gave behind its thought, and whether it is the right one.

    tag       the last <answer>…</answer>
    anchor    what stands behind the last "Answer:", or else behind the last "="
    integer   the first whole number
    auto      the first of these that the text has, the last only where a number is wanted; else
              its first line

Substring search and one pattern over a bounded piece of the text: the cost is linear.
"""

import re
from fractions import Fraction
from typing import Literal, TypeAlias

from es_cookbook.rl.rewards.format import extract_answer

Extraction: TypeAlias = Literal["auto", "tag", "anchor", "integer"]

LONGEST = 10_000
"""Characters of a text, from its start, in which an answer is looked for."""
_ANCHORS = ("answer:", "=")
_INTEGER = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?!\d)|(?<!\d)-?\d+", re.ASCII)
_LETTER = re.compile(r"(?<!\w)\(?([A-Z])\)?(?!\w)")
_NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?", re.ASCII)


def given_answer(text: str, gold: str, extraction: Extraction = "auto") -> str | None:
    """The answer in a text; None where it has none of this kind.

    >>> given_answer("so <answer> 7 </answer>", "7", "tag"), given_answer("3+4 = 7", "7", "anchor")
    ('7', '7')
    >>> given_answer("It is 7 of 9.", "7", "integer"), given_answer("It is 7.", "7", "tag")
    ('7', None)
    """
    text = text[:LONGEST]
    if extraction == "tag":
        return extract_answer(text)
    if extraction == "anchor":
        return _anchored(text)
    if extraction == "integer":
        found = _INTEGER.search(text)
        return found[0].replace(",", "") if found else None
    kinds: tuple[Extraction, ...] = ("tag", "anchor", "integer") if _value(gold) else _WORDS
    given = (given_answer(text, gold, kind) for kind in kinds)
    found = next((each for each in given if each is not None), None)
    return _first_line(text) if found is None else found


_WORDS: tuple[Extraction, ...] = ("tag", "anchor")


def is_right(given: str | None, gold: str) -> bool:
    """Whether an answer is the row's: equal numbers, the same letter of a choice, or the same text.

    >>> is_right("19.0", "19"), is_right("(C) because", "C"), is_right("19 apples", "19")
    (True, True, False)
    """
    if given is None:
        return False
    given, gold = given.strip().rstrip(".").strip(), gold.strip()
    if len(gold) == 1 and "A" <= gold <= "Z":
        letter = _LETTER.search(given)
        return letter is not None and letter[1] == gold
    values = _value(given), _value(gold)
    if values[1] is not None:
        return values[0] == values[1]
    return " ".join(given.lower().split()) == " ".join(gold.rstrip(".").lower().split())


def leaks(thought: str, gold: str) -> bool:
    """Whether a thought has the answer in it, as a word or a number of its own.

    >>> leaks("8,17,19", "19"), leaks("8,17,190", "19"), leaks("", "19")
    (True, False, False)
    """
    found = re.search(rf"(?<![\w]){re.escape(gold.strip())}(?![\w])", thought, re.IGNORECASE)
    return found is not None


def _anchored(text: str) -> str | None:
    lowered = text.lower()
    for anchor in _ANCHORS:
        place = lowered.rfind(anchor)
        if place >= 0:
            return _first_line(text[place + len(anchor) :])
    return None


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].strip()


def _value(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "").removeprefix("$")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None
