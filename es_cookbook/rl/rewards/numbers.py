r"""A grammar of written numbers, in plain text and in LaTeX; other text is not a number.

    number   = [sign] size [scale] ["%"] ["°"] [unit]
    size     = "10" "^" exponent | whole " " whole "/" whole | decimal "/" decimal | decimal
    decimal  = digits ["." digits] ["e" exponent | "×" "10" "^" exponent]

`\frac34` and `\frac{3}{4}` are 3/4. Digits may be in groups of three with commas or LaTeX's `{,}`
and `\,`; they may be of any script.
A scale is hundred, thousand, million, billion or trillion. A currency's sign before or behind is
ignored, and so are `\text{}` and units: symbols (`cm^2`, `m/s`), and behind a whole number words.

`read_whole` reads a text that is nothing but a number, perhaps behind `x =`. `read_last` reads the
last number of a text. It refuses that number where its surroundings change it: `2^{10}`, `12:30`,
`3 or 4`, `1,5`, `x_1`, `H2O`, `3\pi`, `3 - 5`, `not 5` and `1 2` end in no number. Refusing costs a
right answer its reward, and a number that was cut out of an expression would reward a wrong one.

Values are exact rationals. 5% is 0.05. Left out: decimal commas, words for numbers, `½`, and the
values of expressions (`2^{10}`, `\sqrt{4}`), which `reward=math` compares.
"""

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

WINDOW = 100
"""Longest number that is read, in characters; it costs no more if it has a million digits."""

_AROUND = 300
"""Characters before and behind a number that are looked at."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that was read.

    Attributes:
        value: exactly; of 5% it is 1/20.
        is_percent: whether it was written in percent.
    """

    value: Fraction
    is_percent: bool = False

    def is_close(self, gold: "Reading", tolerance: float) -> bool:
        """Return whether both are equal, within a tolerance that is relative above 1.

        It is relative below a millionth too: 2e-9 is not 1e-9.

        If only one is in percent, it may also count percents itself: 5% is 0.05, and is 5 where
        the question asks for percents.
        """
        pairs = [(self.value, gold.value)]
        if self.is_percent != gold.is_percent:
            pairs.append((self._shown, gold._shown))
        return any(abs(a - b) <= Fraction(tolerance) * _scale(abs(b)) for a, b in pairs)

    @property
    def _shown(self) -> Fraction:
        return self.value * 100 if self.is_percent else self.value


def _scale(size: Fraction) -> Fraction:
    return size if 0 < size < Fraction(1, 10**6) else max(Fraction(1), size)


_THIN = "\u2009"
_TEXT = "\u2063"
"""Stands before what was in `\\text{}`: there a single letter is a unit, and not a variable."""
_DIGITS = rf"(?:\d{{1,3}}(?:(?:,\d{{3}})+|(?:{_THIN}\d{{3}})+)(?!\d)|\d+)"
_TEN = r"10\s?(?:\^|\*\*)\s?(?:\{\s?-?\d{1,3}\s?\}|-?\d{1,3}(?!\d))"
_POWER = rf"\s{{0,3}}[×x*]\s{{0,3}}{_TEN}"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\d)|{_POWER})?"
_PART = rf"(?:\s?(\d)|\s?\{{\s?(-?{_DECIMAL})\s?\}})"
_FRACTION = re.compile(rf"(?:(\d) ?)?(?<!\.)\\frac{_PART}{_PART}(?![.,]?\d)")
_MIXED = r"\d+ \d+/\d+"
_METRES = r"(?:[kcdmnµμ]?m|ft|in|yd|mi|inch(?:es)?|feet|met(?:er|re)s?|units?)"
_SYMBOLS = (
    r"(?:[kmµμ]?g|kg|lbs?|oz|m?s|sec|min|hr?|h|m?L|m?l|kWh?|Hz|[kM]?J|[kM]?Pa|[kM]?W|mph|kph)"
)
_UNIT = (
    rf"{_METRES}(?:\^\{{\s?-?\d\s?\}}|\^-?\d|[23])"
    rf"|(?:{_METRES}|{_SYMBOLS})/{_TEXT}?(?:{_METRES}|{_SYMBOLS})(?:\^\{{\s?-?\d\s?\}}|\^-?\d|[23])?"
    r"|[kcmn]m|kg|mg|ml|mL|GB|MB|kB|km/h|mph"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PHRASE = re.compile(
    rf"(?P<sign>[-+]\s?)?(?P<size>{_TEN}|{_MIXED}|{_DECIMAL}\s?/\s?{_DECIMAL}|{_DECIMAL})(?:[\s{_TEXT}]{{1,4}}(?P<scale>{'|'.join(_SCALES)})\b)?"
    rf"(?P<percent>\s?%|[ {_TEXT}-]{{1,4}}percent\b)?°?(?:[ {_TEXT}]*(?:{_UNIT})(?!\w|\^|/))?",
    re.ASCII,
)
_NO_UNITS = (
    "and|or|to|pi|sqrt|squared|cubed|factorial|dozens?|half|halves|thirds?|quarters?|times|plus|"
    "minus|divided|over|mod|modulo|choose|point|than|hundreds?|thousands?|millions?|billions?|"
    "trillions?|percent|tenths?|hundredths?|thousandths?|millionths?|bn|mn|score|pairs?"
)
_WORD = rf"(?!(?:{_NO_UNITS})\b)[A-Za-z]{{2,30}}"
_UNIT_WORDS = re.compile(rf"(?:(?:\s?{_TEXT}\s?[A-Za-z]|[ {_TEXT}]+{_WORD})\.?){{0,4}}", re.ASCII)

_BEFORE = re.compile(
    # Directly before: nothing, or an opening sign that is not itself part of an expression.
    r"(?:^|[\s~≈=]|(?<![\w)\]}^_*])[\"'“‘(\[{*#]+|(?<=[^\d\s]):|<[a-z]{1,10}>|(?<=\W)\*{2})$",
    re.ASCII,
)
_BOUND_BEFORE = re.compile(
    # Before that, on the same line: another number, or an operator on this one.
    r"(?:[-+*/×÷^<>≤≥≠±√|∓–—_](?<!\*\*)|[<>!≤≥≠]\s*=|\\[A-Za-z]+|[\^_][{(]"
    r"|\d[)\]}%°]*(?:\s*[,;]|\s+:|\s+(?:and|or|to|through|by|of|x|out\s+of|times|over))?"
    r"|[A-Za-z]\d*\)|\b(?:not|minus|plus|times|over|or|sqrt|log|ln|exp|sin|cos|tan|mod|negative|power|base)"
    r"|\d\s?(?:hours?|minutes?|days?|weeks?|months?|years?|feet|foot|ft|pounds?|lbs?|dollars?|euros?"
    r"|degrees?|kg|km|h|m)(?:,|\s+and)?"
    r"|n['’]t"
    # Labels that the number belongs to, and does not count.
    r"|\b(?:pp?\.|no\.|(?:page|table|step|section|chapter|example|exercise|question|problem|lemma)s?"
    r"|fig(?:ure|\.)|eq(?:uation|\.)|theorem))\s*[({\[\"'“‘]*$",
    re.IGNORECASE | re.ASCII,
)
_OTHER_SOLUTION = re.compile(
    r"\d[)\]}$%]*\s*(?:[,;]|\b(?:and|or)\b|\\(?:lor|land|vee|wedge)\b)[\s$]*[\w\\{}]{1,9}\s*=\s*$"
)
_SPACED_SIGN_BEFORE = re.compile(r"(?:^|[=:≈]|\b(?:is|be|equals|are|was|of|get))\s+$")
_BEHIND = re.compile(
    # Closing signs and then the text's end, a word, or a sign of no arithmetic.
    rf"(?:[)\]}}\"'”’]|\*+(?!\s?[\w(]))*(?:[.,;:?!…]+(?=[\s*)\]}}\"'”’]|$)|(?=[\s{_TEXT}<]|$))"
    rf"(?!\s*(?:[-+/×÷^±√∞>≤≥≠!]|<(?!/?[a-z]{{1,9}}>|\|)|\((?![A-Za-z]{{2}})|\*\s|\\[A-Za-z]|[^\W\d_]*[^\x00-\x7f]"
    rf"|(?![aAI]\s|[mgshlLKJNWVACF]\b)[A-Za-z]\b(?!['’])|(?:and\s+a\s+)?(?:{_NO_UNITS})\b"
    r"(?<!\band)(?<!\bor)(?<!\bto)(?<!\bthan)(?<!\bover)))"
)

_REPLACED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\{,\}", ","),
        (r"\\,", _THIN),
        ("\u202f", _THIN),
        (r"\\!|\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"\\[;: ()\[\]]|~|\xa0|\\q?quad(?![A-Za-z])", " "),
        (
            r"\s?\\(?:text|textbf|textrm|mathrm|mathbf|mbox|operatorname|rm)\s?\{([^{}]*)\}",
            rf" {_TEXT}\1",
        ),
        (r"\\(?:approx|implies|therefore|(?:R|r|longr|Longr)ightarrow)(?![A-Za-z])|⇒|→", " = "),
        (r"\\%", "%"),
        (r"\^\s?\{?\\circ\}?|\\degree", "°"),
        (r"\\(?:times|cdot)(?![A-Za-z])|·", " × "),
        (r"(?:US)?\\?[$€£¥₹](?!\d)|(?<!\d)(?:US)?\\?[$€£¥₹]", ""),
        ("[\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{SMALL HYPHEN-MINUS}－]", "-"),
        (r"(?<![\w)\]}%.,])(?<!\d )–(?=[\d.\\])", "-"),
        (rf"(?<!\d){_THIN}|{_THIN}(?!\d)", " "),
        (r"(?i)(\d)\s?(?:USD|EUR|GBP)\b", r"\1"),
    )
]
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def read_whole(text: str) -> Reading | None:
    r"""Return the number that a text is, perhaps behind `x =`; None for everything else.

    >>> [read_whole(text) for text in (r"2^{10}", "3 or 4")], read_whole(r"x = \frac34").value
    ([None, None], Fraction(3, 4))
    """
    text = _plain(text).strip() if len(text) <= _AROUND else ""
    name, _, number = text.rpartition("=")
    if re.search(r"[,;<>≤≥≠!]|\b(?:or|and)\b|\\(?:n|l|g)eq?", name):
        return None
    number = number.strip(f" \n\t*{_TEXT}").removesuffix(".").strip(" *")
    if number.startswith("(") and number.endswith(")"):
        number = number[1:-1]
    found = _PHRASE.match(number)
    if found is None or not _UNIT_WORDS.fullmatch(number[found.end() :].rstrip()):
        return None
    return _reading(found)


def read_last(text: str) -> Reading | None:
    """Return the last number of a text; None if there is none, or it is part of something else.

    >>> read_last("from there -1,234.5 or so").value, read_last("3 or 4"), read_last("H2O")
    (Fraction(-2469, 2), None, None)
    """
    if (whole := read_whole(text)) is not None:
        return whole
    end = _end_of_digits(text)
    start = max(end - _AROUND, 0)
    shown = _plain(text[start : end + _AROUND])
    matches = deque(_PHRASE.finditer(shown), maxlen=1)
    if not matches or re.search(r"\d", shown[matches[0].end() :], re.ASCII):
        return None
    found = matches[0]
    if start > 0 and found.start() < _AROUND - 2 * WINDOW:
        return None
    return _reading(found) if _stands_alone(shown, found) else None


def _end_of_digits(text: str) -> int:
    """Return the end of the last digit; other scripts' digits count only near the text's end."""
    others = (i for i in range(len(text), max(len(text) - 1000, 0), -1) if text[i - 1].isdigit())
    return next(others, 1 + max(map(text.rfind, "0123456789⁰¹²³⁴⁵⁶⁷⁸⁹")))


def _stands_alone(text: str, found: re.Match[str]) -> bool:
    """Return whether the text around a number on its line leaves its value as it is."""
    line = text.rfind("\n", 0, found.start()) + 1
    before = text[line : found.start()].replace(_TEXT, "")
    if not _BEFORE.search(before):
        return False
    if re.search(r"(?<![<>!≤≥≠])[=≈~]\s*[\"'(*]*$", before):
        bound = _OTHER_SOLUTION.search(before)
    else:
        bound = _BOUND_BEFORE.search(before)
    sign = found["sign"] or ""
    if sign[1:] and (not _SPACED_SIGN_BEFORE.search(before) or (line > 0 and not before)):
        return False
    behind = text[found.end() :].lstrip()
    if behind.startswith("!") and not re.search("[A-Za-z]", before):
        return False  # 5! is 120.
    return bound is None and _BEHIND.match(text, found.end()) is not None


def _reading(found: re.Match[str]) -> Reading | None:
    """Return the value of a match of the grammar; None if it is too long, or divides by 0."""
    if len(found[0]) > WINDOW:
        return None
    size, is_percent = found["size"], found["percent"] is not None
    try:
        value = _size(size) * 10 ** _SCALES.get(found["scale"] or "", 0)
    except (ZeroDivisionError, _NotProperError):
        return None
    if (found["sign"] or "").startswith("-"):
        value = -value
    return Reading(value / 100 if is_percent else value, is_percent)


class _NotProperError(Exception):
    """A whole number before a fraction that is not between 0 and 1."""


def _size(text: str) -> Fraction:
    whole, mixed, text = text.partition(" ") if re.fullmatch(_MIXED, text) else ("", "", text)
    top, slash, bottom = text.partition("/")
    value = _decimal(top) / _decimal(bottom) if slash else _decimal(top)
    if mixed and not 0 < value < 1:
        raise _NotProperError
    return int(whole or 0) + value


def _decimal(text: str) -> Fraction:
    plain = re.sub(rf"[\s,{{}}{_THIN}]", "", text)
    size, _, power = re.sub(r"(?:^|[×x*])10(?:\^|\*\*)", "e", plain).lower().partition("e")
    return Fraction(size or 1) * Fraction(10) ** int(power or 0)


def _plain(text: str) -> str:
    """Return the text with one spelling for digits, signs, spaces and their LaTeX forms."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: f"^{{{run[0].translate(_RAISED)}}}", text)
        text = "".join(map(_digit, text))
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    return _FRACTION.sub(_as_quotient, text) if "\\frac" in text else text


def _as_quotient(fraction: re.Match[str]) -> str:
    top, bottom = (each for each in fraction.groups()[1:] if each is not None)
    return f"{fraction[1]} {top}/{bottom}" if fraction[1] else f"{top}/{bottom}"


def _digit(character: str) -> str:
    value = None if character.isascii() else unicodedata.decimal(character, None)
    return character if value is None else str(value)
