r"""Answers that are mathematics, compared by math-verify: `\frac{1}{2}` is `0.5`.

math-verify (0.9) parses LaTeX and plain expressions and compares them with sympy. Two traps decide
how it is called. It times itself by `signal.alarm`, which only a process's main thread may have, so
an Env would fail; and some expressions take sympy for ever in one operation that no alarm
interrupts (a tower of powers). So it is imported and called in a worker process, its own alarms
off, and the process is killed after `timeout` seconds.

An answer on which that happens scores 0, unlike other lost scores: a comparison takes a millisecond
and the deadline is thousands of times that, so it is the answer that cannot be read, and a policy
must gain nothing by writing such answers. They are counted, in the metric `math_timeouts`.

Left out: tolerance between decimals and exact values beyond math-verify's own six decimals.
"""

from collections.abc import Callable
from importlib.util import find_spec

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError, WorkerTimeoutError, not_installed
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.rewards.answers import EXTRACT_DOC, Extract, extracted, texts_of
from es_cookbook.rl.rewards.base import Fields, Reward, Score

LONGEST_ANSWER = 1000
"""Characters; a longer answer is wrong, unless it is a whole text, whose end counts."""
LONGEST_BARE = 100
"""Characters of a whole text that may be nothing but the answer."""

_PACKAGE = "math_verify"
_TIMEOUTS = "math_timeouts"


@chz.chz
class Math(Reward):
    r"""1 if math-verify finds the answer equal to the row's, or to one of the row's; else 0.

    The row has LaTeX or a plain expression: `\frac{1}{2}`, `0.5`, `x^2 + 1`, `(1, \infty)`.
    """

    field: str = chz.field(default="answer", doc="row field with the answer, or a list of answers")
    extract: Extract = chz.field(default="auto", doc=EXTRACT_DOC)
    timeout: float = chz.field(default=5.0, doc="seconds for a comparison; then it scores 0")

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "timeout", above=0)

    @override
    def __call__(self, text: str, row: Fields) -> float:
        """1 or 0, without a deadline, in this process: for scripts."""
        golds, answers = self.golds_and_answers(text, row)
        return equal_to_any(golds, answers, is_imported()) if answers else 0.0

    @override
    def read(self, text: str, row: Fields) -> str | None:
        """The answer without white space; what is equal in mathematics alone votes apart."""
        answer = extracted(text, self.extract)
        return None if answer is None else "".join(answer[:LONGEST_ANSWER].split())

    @override
    async def grade(self, text: str, row: Fields) -> Score:
        """1 or 0, from a worker process, and whether it was late."""
        golds, answers = self.golds_and_answers(text, row)
        if not answers:
            return 0.0, {_TIMEOUTS: 0.0}
        try:
            call = in_worker(equal_to_any, golds, answers, _Imported(), timeout=self.timeout)
            return await call, {_TIMEOUTS: 0.0}
        except WorkerTimeoutError:
            return 0.0, {_TIMEOUTS: 1.0}

    @override
    def check(self) -> None:
        if find_spec(_PACKAGE) is None:
            raise _not_installed()

    @override
    def check_row(self, row: Fields) -> None:
        self.golds_and_answers("", row)
        self.check()  # A row may have named this reward itself.

    def golds_and_answers(self, text: str, row: Fields) -> tuple[list[str], list[str]]:
        """What to compare: any of the first with any of the second."""
        golds = [as_latex(gold) for gold in texts_of(row, self.field)]
        answer = extracted(text, self.extract)
        if not answer:
            return golds, []
        if answer != text.strip():
            return golds, [as_latex(answer)] if len(answer) <= LONGEST_ANSWER else []
        # A whole text may be a sentence with the answer in it, or be it.
        whole = [as_latex(answer)] if len(answer) <= LONGEST_BARE else []
        return golds, [answer[-LONGEST_ANSWER:], *whole]


def as_latex(answer: str) -> str:
    r"""An answer between dollars, where math-verify looks for it, unless it is marked already.

    >>> as_latex(r"\frac{1}{2}"), as_latex(r"so $x$"), as_latex(r"\boxed{2}"), as_latex(r"\$5")
    ('$\\frac{1}{2}$', 'so $x$', '\\boxed{2}', '$\\$5$')
    """
    unescaped = answer.replace(r"\$", "")
    if any(mark in unescaped for mark in ("$", r"\boxed", r"\(", r"\[")):
        return answer
    return f"${' '.join(answer.split())}$"


def equal_to_any(golds: list[str], answers: list[str], imported: object) -> float:
    """1 or 0, by math-verify without its own alarms; may take for ever.

    Args:
        golds: accepted answers.
        answers: LaTeX or texts; one has to be equal to one of the accepted.
        imported: what `is_imported` returned.

    Raises:
        ConfigError: math-verify is not installed.
        DataError: An accepted answer is no mathematics.
    """
    if not imported:
        raise _not_installed()
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    found = [parse(answer, parsing_timeout=0) for answer in answers]
    for gold in golds:
        expected = parse(gold, parsing_timeout=0)
        if not expected:
            raise DataError(f"math-verify cannot read the row's answer {gold!r:.60}")
        if any(verify(expected, parsed, timeout_seconds=0) for parsed in found):
            return 1.0
    return 0.0


def is_imported() -> bool:
    """Import math-verify and use it once, which takes a second; False where it is not installed."""
    try:
        from math_verify import parse  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    parse("$1$", parsing_timeout=0)
    return True


class _Imported:
    """`is_imported()` of the process that unpickles it: a worker, before its time runs."""

    def __reduce__(self) -> tuple[Callable[[], bool], tuple[()]]:
        return is_imported, ()


def _not_installed() -> ConfigError:
    return not_installed("reward=math", "math-verify", "es-cookbook[math]")
