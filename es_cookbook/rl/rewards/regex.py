r"""1 where a regular expression matches the answer: the one idea is where it runs.

Python's regular expressions backtrack: `(a+)+$` on forty letters runs for hours, and which patterns
do cannot be decided by looking at them. So an Env's matches run in a worker process, which is
killed after `timeout` seconds. The rollout is then lost and not scored 0: the pattern is the row's,
and the same text might be in time on another machine. A round trip takes some 0.3 ms.

Pitfall: called directly, as `reward(text, row)`, the match runs here and without a deadline.
"""

import re

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError, WorkerTimeoutError
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.rewards.answers import EXTRACT_DOC, Extract, extracted, field_of
from es_cookbook.rl.rewards.base import Fields, Reward

LONGEST_PATTERN = 1000
"""Characters: compiling takes time too."""
LONGEST_ANSWER = 100_000
"""Characters; a longer answer matches nothing."""


@chz.chz
class Regex(Reward):
    r"""1 if a pattern matches the answer, by default anywhere in it; else 0.

    Python's `re`; flags stand in the pattern: `(?i)` for any case, `(?s)` for dots that match line
    ends.

    >>> Regex(pattern=r"\d{4}")("in <answer>May 1968</answer>", {})
    1.0
    """

    pattern: str | None = chz.field(
        default=None, doc="regular expression for all rows; None: each row has its own"
    )
    field: str = chz.field(
        default="pattern", doc="row field with the pattern, if there is no other"
    )
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
        """1 or 0, without a deadline."""
        pattern, answer = self._pattern(row), self._answer(text)
        return 0.0 if answer is None else matches(pattern, answer, self.whole)

    @override
    async def grade(self, text: str, row: Fields) -> float:
        """1 or 0, from a worker process.

        Raises:
            DataError: The row's pattern is none, or took too long.
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
            return self.pattern
        pattern = field_of(row, self.field)
        if not isinstance(pattern, str):
            raise DataError(f"field {self.field!r} must be a text, found {pattern!r:.60}")
        return pattern


def matches(pattern: str, answer: str, whole: bool) -> float:
    """1 or 0; may take for ever.

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
