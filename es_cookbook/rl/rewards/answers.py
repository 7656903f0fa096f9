r"""The final answer in a model's text, and the accepted answers in a row.

Models are asked for `<answer>…</answer>` or for `\boxed{…}`. What they wrote last counts, so that
a thought before it may try others. Everything here is substring search, and a box is followed for
a limited number of characters, so the cost is linear in the text, whatever it is.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import DataError, did_you_mean
from es_cookbook.rl.rewards.format import ANSWER_OPEN, extract_answer

Extract: TypeAlias = Literal["auto", "answer", "boxed", "text"]
"""Where an answer stands: the last `<answer>`, the last box, the whole text, or the first of these
that the text has."""

EXTRACT_DOC = r"where the answer stands: answer (last <answer>), boxed (last \boxed{}), text, auto"

LONGEST_BOX = 10_000
"""Characters within which a box must be closed."""

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


def field_of(row: Mapping[str, object], name: str) -> object:
    """The value of a row's field.

    Raises:
        DataError: There is none; names the nearest.
    """
    value = row.get(name)
    if value is None:
        present = [key for key, found in row.items() if found is not None]
        raise DataError(
            f"field {name!r} is missing{did_you_mean(name, present)}; "
            f"the row has: {', '.join(present) or 'nothing'}"
        )
    return value


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
