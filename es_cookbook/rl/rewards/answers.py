r"""The final answer in a model's text, the last number in one, and the accepted answers in a row.

Models are asked for `<answer>…</answer>` or for `\boxed{…}`. What they wrote last counts, so that
a thought before it may try others. Everything here is substring search, and a box is followed for
a limited number of characters, so the cost is linear in the text, whatever it is.

Numbers are `-1,234.5`, `5e-3`, `3/4`, `$12` or `+7`: whole or decimal, with commas between groups
of three digits, a power of ten, or a fraction of two of these. A sign belongs to a number unless a
digit, a letter or a closing bracket stands before: `3-5` ends in 5. A percent sign is ignored, so
50% is 50. Values are exact rationals. Left out: words, mixed numbers (`1 3/4` ends in 3/4), and
decimal commas (`1,5` ends in 5).
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import DataError, did_you_mean
from es_cookbook.rl.rewards.format import ANSWER_OPEN, extract_answer

Extract: TypeAlias = Literal["auto", "answer", "boxed", "text"]
"""Where an answer stands: the last `<answer>`, the last box, the whole text, or the first of these
that the text has."""

EXTRACT_DOC = r"where the answer stands: answer (last <answer>), boxed (last \boxed{}), text, auto"

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of choices, and how many there may be."""
LONGEST_BOX = 10_000
"""Characters within which a box must be closed."""

WINDOW = 100
"""Longest number that is read, in characters; it costs no more if it has a million digits."""

_UNSIGNED = (
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
)
_NUMBER = re.compile(
    rf"((?<![\w)\]}}])[-+\u2212])?[$€£]?({_UNSIGNED})(?:\s?/\s?({_UNSIGNED}))?", re.ASCII
)
_CUT = 3
"""Characters from a window's start at which the rest of a number that it cuts may begin."""
_BOX = r"\boxed"
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def extracted(text: str, extract: Extract) -> str | None:
    r"""The final answer, stripped; None where it is missing or never closed.

    >>> extracted(r"so <answer>\boxed{\frac{1}{2}}</answer>", "auto")
    '\\boxed{\\frac{1}{2}}'
    >>> extracted(r"so \boxed{\frac{1}{2}}.", "auto")
    '\\frac{1}{2}'
    >>> extracted("so 1/2", "answer") is None
    True
    """
    if extract == "answer" or (extract == "auto" and ANSWER_OPEN in text):
        return extract_answer(text)
    if extract == "boxed" or (extract == "auto" and _BOX in text):
        return boxed(text)
    return text.strip()


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, stripped, its braces balanced; None without one.

    A box in a box is the last. Braces after a backslash are text. None too where the box is not
    closed within `LONGEST_BOX` characters.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    content = text[start + len(_BOX) : start + len(_BOX) + LONGEST_BOX].lstrip()
    if not content.startswith("{"):
        return None
    depth = 0
    for brace in _BRACES.finditer(content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return content[1 : brace.start()].strip()
    return None


def last_match(pattern: re.Pattern[str], text: str, start: int, end: int) -> re.Match[str] | None:
    """The last of a pattern's matches in text[start:end], found from the left."""
    matches = deque(pattern.finditer(text, start, end), maxlen=1)
    return matches[0] if matches else None


def last_number(text: str) -> Fraction | None:
    """The exact value of the last number in a text; None where there is none, or it is too long.

    >>> last_number("from 3 to -1,234.5 or so"), last_number("12/16"), last_number("1/0")
    (Fraction(-2469, 2), Fraction(3, 4), None)
    """
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    start = max(end - WINDOW, 0)
    last = last_match(_NUMBER, text, start, end)
    if last is None or (start > 0 and last.start() < start + _CUT):
        return None
    sign, top, bottom = last.groups(default="1")
    divisor = _unsigned(bottom)
    if divisor == 0:
        return None
    value = _unsigned(top) / divisor
    return -value if sign in "-\u2212" else value


def _unsigned(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def first_field(fields: Mapping[str, object], *names: str) -> tuple[str, object]:
    """The first of the names that is there, and its value.

    Raises:
        DataError: None is; names the nearest.
    """
    present = [name for name, value in fields.items() if value is not None]
    for name in names:
        if name in present:
            return name, fields[name]
    missing, hint = " or ".join(map(repr, names)), did_you_mean(names[0], present)
    shown = ", ".join(present) or "nothing"
    raise DataError(f"field {missing} is missing{hint}; the row has: {shown}")


def field_of(row: Mapping[str, object], name: str) -> object:
    """The value of a row's field.

    Raises:
        DataError: There is none; names the nearest.
    """
    return first_field(row, name)[1]


def lettered(texts: Sequence[str]) -> str:
    r"""Choices by letter, a line each.

    >>> lettered(["red", "green"])
    'A. red\nB. green'
    """
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))


def texts_of(row: Mapping[str, object], name: str) -> Sequence[str]:
    """A row's text, or list of texts; numbers count as the text that shows them.

    Raises:
        DataError: It is missing, empty or something else.
    """
    value = field_of(row, name)
    items = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
    if not items or not all(_is_text(item) for item in items):
        raise DataError(
            f"field {name!r} must be a text, a number or a list of them, found {value!r:.60}"
        )
    return [str(item) for item in items]


def _is_text(item: object) -> bool:
    return isinstance(item, str | int | float) and not isinstance(item, bool) and item != ""
