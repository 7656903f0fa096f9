r"""The final answer in a model's text, the last number in one, and the accepted answers in a row.

Models are asked for `<answer>…</answer>` or for `\boxed{…}`. The last answer counts, and
thoughts do not (`es_cookbook.rl.messages.thoughts`). Everything here is substring
search, and a box is followed for a limited number of characters, so the cost is linear in any
text.

`es_cookbook.rl.rewards.numbers` defines numbers.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import DataError, did_you_mean
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.format import ANSWER_OPEN, last_answer
from es_cookbook.rl.rewards.numbers import Reading, read_last, read_whole
from es_cookbook.rl.rewards.values import Scalar, composed, printed

Extract: TypeAlias = Literal["auto", "answer", "boxed", "text"]
"""Place of an answer: the last `<answer>`, the last box, the whole text, or the first of these that
the text has."""

EXTRACT_DOC = r"where the answer stands: answer (last <answer>), boxed (last \boxed{}), text, auto"

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST_BOX = 10_000
"""Characters within which a box must be closed."""

_BOX = r"\boxed"
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def extracted(text: str, extract: Extract) -> str | None:
    r"""Return the final answer in a text, stripped and in NFC; None if missing or not closed.

    >>> extracted(r"so <answer>\boxed{\frac{1}{2}}</answer>", "auto")
    '\\boxed{\\frac{1}{2}}'
    >>> extracted(r"so \boxed{\frac{1}{2}}.", "auto")
    '\\frac{1}{2}'
    >>> extracted("so 1/2", "answer") is None, extracted(r"<think>so \boxed{2}", "boxed") is None
    (True, True)
    """
    said = composed(spoken(text))
    # Attempts that are nothing but thoughts have no answer to vote for.
    return said_answer(said, extract) if said or not text else None


def said_answer(text: str, extract: Extract) -> str | None:
    """Return the final answer in a text in NFC that has no thoughts."""
    if extract == "answer" or (extract == "auto" and ANSWER_OPEN in text):
        return last_answer(text)
    return boxed(text) if is_boxed(text, extract) else text.strip()


def is_boxed(text: str, extract: Extract) -> bool:
    """Return whether the answer of a text without thoughts is in a box that ends it."""
    return extract == "boxed" or (extract == "auto" and ANSWER_OPEN not in text and _BOX in text)


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, stripped, with balanced braces, or None.

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
    """Return the last of a pattern's matches in text[start:end], found from the left."""
    matches = deque(pattern.finditer(text, start, end), maxlen=1)
    return matches[0] if matches else None


def last_number(text: str) -> Fraction | None:
    """Return the exact value of a text's number (`number_in`); None if there is none.

    >>> last_number("from there -1,234.5 or so"), last_number("12/16"), last_number("1/0")
    (Fraction(-2469, 2), Fraction(3, 4), None)
    """
    found = number_in(text, "text")
    return None if found is None else found.value


def number_in(text: str, extract: Extract) -> Reading | None:
    r"""Return the number of an answer: the whole box, or the last number of other texts.

    >>> number_in(r"2 + 2 = \boxed{4}", "auto"), number_in(r"so \boxed{3x} or 4", "auto")
    (Reading(value=Fraction(4, 1), is_percent=False), None)
    """
    text = spoken(text)
    answer = said_answer(text, extract)
    if answer is None:
        return None
    is_box = is_boxed(text, extract)
    if not is_box and _BOX in answer:
        answer, is_box = boxed(answer) or "", True
    return read_whole(answer) if is_box else read_last(answer)


def gold_number(text: str) -> Reading | None:
    r"""Return the number of a row's answer: in its tags, its box, after ####, or the whole text.

    >>> gold_number("6 * 7 = 42\n#### 42"), gold_number("about 5 (see p. 12)")
    (Reading(value=Fraction(42, 1), is_percent=False), None)
    """
    answer = extracted(text, "auto")
    if answer is None:
        return None
    if _BOX in answer:
        answer = boxed(answer) or ""
    return read_whole(answer.rpartition("####")[2])


def first_field(fields: Mapping[str, object], *names: str) -> tuple[str, object]:
    """Return the first of the names that exists, and its value.

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
    """Return the value of a row's field.

    Raises:
        DataError: There is none; names the nearest.
    """
    return first_field(row, name)[1]


def letter(position: int) -> str:
    """Return the name of a choice: A to Z, then AA to ZZ, and so on.

    >>> [letter(position) for position in (0, 25, 26, 701, 702)]
    ['A', 'Z', 'AA', 'ZZ', 'AAA']
    """
    before, last = divmod(position, len(_ALPHABET))
    return (letter(before - 1) if before else "") + _ALPHABET[last]


def text_of(row: Mapping[str, object], name: str) -> str:
    """Return the value of a row's field as text.

    Raises:
        DataError: There is none, or it has bytes in it, or is nested too deeply.
    """
    value = field_of(row, name)
    try:
        return printed(value)
    except DataError as error:
        raise DataError(f"field {name!r} {error}") from None
    except RecursionError:
        raise DataError(f"field {name!r} is nested too deeply to be shown") from None


def lettered(texts: Sequence[str]) -> str:
    r"""Return choices by letter, one per line.

    >>> lettered(["red", "green"])
    'A. red\nB. green'
    """
    return "\n".join(f"{letter(position)}. {text}" for position, text in enumerate(texts))


def texts_of(row: Mapping[str, object], name: str) -> Sequence[str]:
    """Return a row's text, or list of texts, in NFC, with numbers and dates as text.

    Raises:
        DataError: It is missing, empty or something else.
    """
    value = field_of(row, name)
    items = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
    if not items or not all(_is_text(item) for item in items):
        raise DataError(
            f"field {name!r} must be a text, a number or a list of them, found {value!r:.60}"
        )
    return [composed(printed(item)) for item in items]


def _is_text(item: object) -> bool:
    return isinstance(item, Scalar) and not isinstance(item, bool) and item != ""
