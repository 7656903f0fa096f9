"""Answers that are texts or numbers: the row's own, one of its choices, or a match of a pattern."""

import functools
import re
from collections.abc import Sequence
from typing import cast

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range, in_range
from es_cookbook.common.errors import ConfigError, DataError, WorkerTimeoutError
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.rewards.answers import (
    EXTRACT_DOC,
    Extract,
    extracted,
    field_of,
    gold_number,
    last_match,
    letter,
    number_in,
    texts_of,
)
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.rewards.numbers import Reading
from es_cookbook.rl.rewards.values import Scalar, composed, folded, printed

LONGEST_READ = 1000
"""Longest answer that attempts vote by, in characters."""
MOST_CHOICES = 702
"""Most choices: from A to ZZ."""
LONGEST_CHOICE = 2000
"""A choice is looked for in the last characters of an answer."""
LONGEST_PATTERN = 1000
"""Characters: compiling takes time too."""
LONGEST_ANSWER = 100_000
"""Characters; a longer answer matches no pattern."""


@chz.chz
class Exact(Reward):
    """1 if the answer is the row's, or one of the row's, character for character; else 0.

    Letters with accents are one character, however they are written (Unicode's NFC).

    >>> Exact()("It is <answer> new  york </answer>", {"answer": "New York"})
    1.0
    """

    field: str = chz.field(default="answer", doc="row field with the answer, or a list of answers")
    extract: Extract = chz.field(default="auto", doc=EXTRACT_DOC)
    fold_case: bool = chz.field(default=True, doc="upper and lower case are the same")
    fold_spaces: bool = chz.field(default=True, doc="any run of white space is one space")

    def __call__(self, text: str, row: Fields) -> float:
        golds = texts_of(row, self.field)
        answer = extracted(text, self.extract)
        # Folding a megabyte takes long, and changes lengths by little but for white space.
        if answer is None or len(answer) > 1000 + 4 * max(map(len, golds)):
            return 0.0
        return float(self._folded(answer) in map(self._folded, golds))

    @override
    def read(self, text: str, row: Fields) -> str | None:
        answer = extracted(text, self.extract)
        return None if answer is None else self._folded(answer[:LONGEST_READ])

    def _folded(self, text: str) -> str:
        if self.fold_spaces:
            text = " ".join(text.split())
        return folded(text) if self.fold_case else text.strip()


@chz.chz
class Choice(Reward):
    """1 if the choice that the answer names last is the row's; else 0.

    A choice is named by its capital letter (A for the first, AA after Z) or by its text in any
    case, each as a separate word. An answer that is only a letter may be in any case.
    Where a choice's text is itself a single letter, or one of these names, letters name no
    positions. The row has its answer as a letter, a text, or a position counted from 0; or as a
    label if choices have labels, as in ARC: `{"text": [...], "label": [...]}`.

    Pitfall: "A" at the start of a sentence names the first choice; have answers in tags.

    >>> row = {"choices": ["Paris", "Rome"], "answer": "B"}
    >>> Choice()("Not Paris, so <answer>Rome</answer>", row), Choice()("(A)", row)
    (1.0, 0.0)
    """

    field: str = chz.field(default="answer", doc="field with the right letter, text or position")
    choices: str = chz.field(default="choices", doc="row field with the list of choices")
    extract: Extract = chz.field(default="auto", doc=EXTRACT_DOC)

    def __call__(self, text: str, row: Fields) -> float:
        choices = self._texts(row)
        if not 2 <= len(choices) <= MOST_CHOICES:
            raise DataError(
                f"field {self.choices!r} must be a list of 2 to {MOST_CHOICES} choices, found "
                f"{len(choices)}"
            )
        labels = _labelled(row.get(self.choices)).get("label")
        gold = field_of(row, self.field)
        if isinstance(labels, list) and gold in labels:
            gold = cast("list[object]", labels).index(gold)
        right = self._right(gold, choices)
        answer = extracted(text, self.extract)
        return float(answer is not None and named_last(answer, choices) == right)

    @override
    def read(self, text: str, row: Fields) -> str | None:
        choices = self._texts(row)
        answer = extracted(text, self.extract)
        named = None if answer is None else named_last(answer, choices)
        return None if named is None else letter(named)

    def _texts(self, row: Fields) -> Sequence[str]:
        texts = _labelled(row.get(self.choices)).get("text")
        shown = row if texts is None else {self.choices: texts}
        return [" ".join(choice.split()) for choice in texts_of(shown, self.choices)]

    def _right(self, gold: object, choices: Sequence[str]) -> int:
        found = _positions(tuple(choices)).get(_key(gold)) if isinstance(gold, str) else None
        numbers = [str(position) for position in range(len(choices))]
        if found is None and isinstance(gold, Scalar) and printed(gold) in numbers:
            return numbers.index(printed(gold))  # In CSV a text, beside nulls in pandas a float.
        if found is None:
            raise DataError(
                f"field {self.field!r} must be one of the {len(choices)} choices, its letter or "
                f"its position from 0 to {len(choices) - 1}, found {gold!r:.60}"
            )
        return found


def _labelled(choices: object) -> dict[str, object]:
    """Return choices with labels; {} for others."""
    return cast("dict[str, object]", choices) if isinstance(choices, dict) else {}


def named_last(answer: str, choices: Sequence[str]) -> int | None:
    """Return the position of the choice that an answer names last; None if it names none.

    Args:
        answer: text whose last `LONGEST_CHOICE` characters count.
        choices: texts without runs of white space.

    >>> named_last("First (A), but it is (C).", ["red", "green", "blue"])
    2
    """
    positions = _positions(tuple(choices))
    if len(answer) <= LONGEST_CHOICE and (whole := positions.get(_key(answer))) is not None:
        return whole
    pattern, order = _mentions(tuple(choices))
    # With two characters before the window, which tell whether a word begins there.
    window = answer[-LONGEST_CHOICE - 2 :]
    last = last_match(pattern, window, max(len(window) - LONGEST_CHOICE, 0), len(window))
    if last is None or last.lastindex is None:
        return None
    found = order[last.lastindex - 1] if last.lastindex <= len(order) else None
    return positions[_key(last[0])] if found is None else found


def _key(text: str) -> str:
    key = folded(" ".join(text.split()))
    return key.strip(" ().") or key


@functools.lru_cache(maxsize=4096)
def _positions(choices: tuple[str, ...]) -> dict[str, int]:
    """Map texts, and letters if they name positions, as `_key` writes them, to positions."""
    texts = {_key(choice): i for i, choice in enumerate(choices)}
    if len(texts) < len(choices) or not all(texts):
        raise DataError(f"the choices must be texts that differ, found {list(choices)!r:.60}")
    return {_key(name): i for i, name in enumerate(_letters(choices))} | texts


def _letters(choices: tuple[str, ...]) -> Sequence[str]:
    """Return the letters that name positions: none if a choice is itself a letter."""
    letters = [letter(i) for i in range(len(choices))]
    names = {*map(_key, letters)}
    are_texts = any(key in names or (len(key) == 1 and key.isalpha()) for key in map(_key, choices))
    return [] if are_texts else letters


@functools.lru_cache(maxsize=4096)
def _mentions(choices: tuple[str, ...]) -> tuple[re.Pattern[str], list[int]]:
    """Return a pattern for choices in a text, and the position that each group stands for.

    A group for every text, the longer first where one begins with another, then one for letters.
    """
    order = sorted(range(len(choices)), key=lambda i: len(choices[i]), reverse=True)
    texts = [r"\s{1,9}".join(map(re.escape, choices[i].split())) for i in order]
    groups = [f"((?i:{text}))" for text in texts]
    if letters := _letters(choices):
        groups.append(f"({'|'.join(letters)})")
    named = "|".join(groups)
    return re.compile(rf"(?<!\w)(?<!\d[.,])(?:{named})(?!\w|[.,]\d)"), order


@chz.chz
class Number(Reward):
    r"""1 if the number of the answer is the row's, within a tolerance; else 0.

    A box must be wholly a number; of another text the last number counts, by the grammar of
    `es_cookbook.rl.rewards.numbers`, which reads `9{,}500` and `\frac34`, and nothing in `2^{10}`.
    The row has a number, or a text that is wholly one; GSM8K's solutions end in `#### 42`. Any
    item of a list will do.

    >>> Number()("It costs $1,234.50.", {"answer": 1234.5})
    1.0
    """

    field: str = chz.field(default="answer", doc="row field with the number, or a list of numbers")
    extract: Extract = chz.field(default="auto", doc=EXTRACT_DOC)
    tolerance: float = chz.field(
        default=1e-6,
        doc="largest difference; of numbers above 1 or below 1e-6, as a share of the row's",
    )

    _tolerance = in_range("tolerance", at_least=0)

    def __call__(self, text: str, row: Fields) -> float:
        """Return 1 or 0."""
        golds = [self._gold(gold) for gold in texts_of(row, self.field)]
        value = number_in(text, self.extract)
        if value is None:
            return 0.0
        return float(any(value.is_close(gold, self.tolerance) for gold in golds))

    @override
    def read(self, text: str, row: Fields) -> str | None:
        found = number_in(text, self.extract)
        return None if found is None else str(found.value)

    def _gold(self, text: str) -> Reading:
        gold = gold_number(text)
        if gold is None:
            raise DataError(f"field {self.field!r} must be wholly a number, found {text!r:.60}")
        return gold


@chz.chz
class Regex(Reward):
    r"""1 if a pattern matches the answer, by default anywhere in it; else 0.

    Letters with accents are one character (Unicode's NFC), in answers as in patterns. Python's
    `re`; flags stand in the pattern: `(?i)` for any case, `(?s)` for dots that match line
    ends.

    Regular expressions backtrack: `(a+)+$` on forty letters runs for hours, and which patterns do
    cannot be decided by looking at them. So an Env's matches run in a worker process, which is
    killed after `timeout` seconds. The rollout is then lost and not scored 0: the pattern is the
    row's, and the same text might be in time on another machine. A round trip takes some 0.3 ms.

    Pitfall: called directly, as `reward(text, row)`, the match runs here and without a deadline.

    >>> Regex(pattern=r"\d{4}")("in <answer>May 1968</answer>", {})
    1.0
    """

    pattern: str | None = chz.field(
        default=None, doc="regular expression for all rows; None: each row has its own"
    )
    field: str = chz.field(default="pattern", doc="row field with the pattern if none is given")
    extract: Extract = chz.field(default="auto", doc=EXTRACT_DOC)
    whole: bool = chz.field(default=False, doc="must match the whole answer, not a part of it")
    timeout: float = chz.field(default=1.0, doc="seconds for a match; then the rollout is lost")

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "timeout", above=0)
        if self.pattern is not None:
            try:
                _compiled(self.pattern)
            except DataError as error:
                raise ConfigError(f"pattern {error}") from None

    def __call__(self, text: str, row: Fields) -> float:
        """Return 1 or 0, without a deadline."""
        pattern, answer = self._pattern(row), self._answer(text)
        return 0.0 if answer is None else matches(pattern, answer, self.whole)

    @override
    async def grade(self, text: str, row: Fields) -> float:
        """Return 1 or 0, from a worker process.

        Raises:
            DataError: The row's pattern is invalid, or took too long.
        """
        pattern, answer = self._pattern(row), self._answer(text)
        if answer is None:
            return 0.0
        try:
            return await in_worker(matches, pattern, answer, self.whole, timeout=self.timeout)
        except WorkerTimeoutError:
            raise DataError(
                f"the pattern {pattern!r:.60} was not done after {self.timeout:g} s with an answer "
                f"of {len(answer):,} characters; write it without repeats inside of repeats"
            ) from None

    @override
    def check_row(self, row: Fields) -> None:
        _compiled(self._pattern(row))

    def _answer(self, text: str) -> str | None:
        answer = extracted(text, self.extract)
        return None if answer is None or len(answer) > LONGEST_ANSWER else answer

    def _pattern(self, row: Fields) -> str:
        if self.pattern is not None:
            return composed(self.pattern)
        pattern = field_of(row, self.field)
        if not isinstance(pattern, str):
            raise DataError(f"field {self.field!r} must be a text, found {pattern!r:.60}")
        return composed(pattern)


def matches(pattern: str, answer: str, whole: bool) -> float:
    """Return 1 or 0; may not terminate.

    Raises:
        DataError: Not a pattern.
    """
    compiled = _compiled(pattern)
    return float((compiled.fullmatch if whole else compiled.search)(answer) is not None)


def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > LONGEST_PATTERN:
        raise DataError(
            f"must have at most {LONGEST_PATTERN} characters, found {len(pattern):,}: "
            f"{pattern!r:.60}"
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise DataError(f"must be a regular expression ({error}), found {pattern!r:.60}") from None
