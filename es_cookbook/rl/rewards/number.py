"""The last number in an answer, compared with the row's.

    -1,234.5    5e-3    3/4    $12    +7

A number is whole or decimal, with commas between groups of three digits, a power of ten, or a
fraction of two of these. A sign belongs to it unless a digit, a letter or a closing bracket stands
before: `3-5` ends in 5. A percent sign is ignored, so 50% is 50. Values are exact rationals.

The last digit of the text is found first, and only what stands within `WINDOW` characters before it
is read, so a megabyte of digits costs no more than a short text. It is no number.

Left out: words, mixed numbers (`1 3/4` ends in 3/4), and decimal commas (`1,5` ends in 5).
"""

import re
from fractions import Fraction

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.rl.rewards.answers import EXTRACT_DOC, Extract, extracted, last_match, texts_of
from es_cookbook.rl.rewards.base import Fields, Reward

WINDOW = 100
"""Longest number that is read, in characters."""

_UNSIGNED = (
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
)
_NUMBER = re.compile(
    rf"((?<![\w)\]}}])[-+\u2212])?[$€£]?({_UNSIGNED})(?:\s?/\s?({_UNSIGNED}))?", re.ASCII
)
_CUT = 3
"""Characters from a window's start at which the rest of a number that it cuts may begin."""


@chz.chz
class Number(Reward):
    """1 if the last number of the answer is the row's, within a tolerance; else 0.

    The row has a number, or a text whose last number counts: GSM8K's solutions end in `#### 42`. Of
    a list any will do.

    >>> Number()("It costs $1,234.50.", {"answer": 1234.5})
    1.0
    """

    field: str = chz.field(default="answer", doc="row field with the number, or a list of numbers")
    extract: Extract = chz.field(default="auto", doc=EXTRACT_DOC)
    tolerance: float = chz.field(
        default=1e-6, doc="largest difference; of numbers above 1, as a share of the row's"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "tolerance", at_least=0)

    def __call__(self, text: str, row: Fields) -> float:
        golds = [self._gold(gold) for gold in texts_of(row, self.field)]
        answer = extracted(text, self.extract)
        value = None if answer is None else last_number(answer)
        return float(value is not None and any(self._is_close(value, gold) for gold in golds))

    def _gold(self, text: str) -> Fraction:
        gold = last_number(text)
        if gold is None:
            raise DataError(f"field {self.field!r} must hold a number, found {text!r:.60}")
        return gold

    def _is_close(self, value: Fraction, gold: Fraction) -> bool:
        return abs(value - gold) <= Fraction(self.tolerance) * max(1, abs(gold))


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
