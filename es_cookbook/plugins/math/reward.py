r"""Answers that are mathematics, compared by math-verify: `\frac{1}{2}` is `0.5`.

math-verify (0.9) parses LaTeX and compares it with sympy. What it does by itself credits wrong
answers: of a text it takes an expression that stands somewhere in it, of `5\text{ million}` it
reads 5, of `1 234` and `2(3)` sums, of `1011_2` 1011; `R` and `r` are one variable, `10^{-20}` and
`10^{-30}` one number, `2x + y = 3` is 3, and `listen` is `silent`. So an answer is given to it
whole or not at all (`stated`), where it is a formula that it reads as it is meant (`_is_readable`);
equal texts are equal, numbers are compared by `es_cookbook.rl.rewards.numbers`, and words as words.

Two more traps decide how it is called. It times itself by `signal.alarm`, which only a process's
main thread may have, so an Env would fail; and some expressions keep sympy busy forever in one
operation that no alarm interrupts (a tower of powers). So it is imported and called in a worker
process, its own alarms off, and the process is killed after `timeout` seconds.

An answer on which that happens scores 0, unlike other lost scores: a comparison takes a millisecond
and the deadline is thousands of times that, so it is the answer that cannot be read, and a policy
must gain nothing by writing such answers. They are counted, in the metric `math_timeouts`.

Left out: tolerance between decimals and exact values beyond math-verify's own six decimals; numbers
in another base; words beside formulas but units, `and` and `or`.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from importlib.util import find_spec
from typing import Any, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError, DataError, WorkerTimeoutError, not_installed
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.answers import (
    EXTRACT_DOC,
    Extract,
    boxed,
    extracted,
    is_boxed,
    said_answer,
    texts_of,
)
from es_cookbook.rl.rewards.base import Fields, Reward, Score
from es_cookbook.rl.rewards.numbers import Reading, read_last, read_whole
from es_cookbook.rl.rewards.values import composed

LONGEST_ANSWER = 1000
"""Characters; a longer answer is wrong, unless it is a whole text, whose end counts."""
LONGEST_BARE = 300
"""Limit on the characters of a text without dollars that may be the answer as a whole."""

_TOLERANCE = 1e-6
_SMALL_SHARE = 1e-3
"""Limit on the relative difference of small numbers that are equal within six decimals."""
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

    _timeout = in_range("timeout", above=0)

    @override
    def __call__(self, text: str, row: Fields) -> float:
        """Return 1 or 0, without a deadline, in this process: for scripts."""
        golds, answers = self.golds_and_answers(text, row)
        return equal_to_any(golds, answers, is_imported()) if answers else 0.0

    @override
    def read(self, text: str, row: Fields) -> str | None:
        """Return the answer without white space; equal formulas of other forms differ."""
        answer = extracted(text, self.extract)
        return None if answer is None else "".join(answer[:LONGEST_ANSWER].split())

    @override
    async def grade(self, text: str, row: Fields) -> Score:
        """Return 1 or 0, from a worker process, and whether it was late."""
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

    def golds_and_answers(self, text: str, row: Fields) -> tuple[list[str], list[str]]:
        """Return the formulas to compare: right answers, and the given one or none."""
        golds = [self._gold(gold) for gold in texts_of(row, self.field)]
        text = composed(spoken(text))
        answer = said_answer(text, self.extract)
        if not answer or (len(answer) > LONGEST_ANSWER and answer != text.strip()):
            return golds, []
        is_whole = is_boxed(text, self.extract)  # The content of a box, without dollars.
        found = _DOLLARS.sub(" ", answer).strip() if is_whole else stated(answer)
        return golds, [found] if 0 < len(found) <= LONGEST_ANSWER else []

    def _gold(self, text: str) -> str:
        found = stated(text.rpartition("####")[2])
        if not found:
            raise DataError(f"field {self.field!r} must state a formula, found {text!r:.60}")
        return found


_SEGMENT = re.compile(
    r"\$\$([^$]+)\$\$|\$((?:\\\$|[^$\n])+)\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]",
    re.DOTALL,
)
_DOLLARS = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_JOINS = re.compile(r"[\s*]*(?:[,;]|[,;]?\s*\b(?:and|or)\b)[\s*]*")
_BINDS = re.compile(
    r"(?:[-+/^<>≤≥≠±×÷∓–—_\d]|\b(?:not|minus|plus|times|over|to|than|least|most|between|except|and|or"
    r"|mod|modulo|by|of|through|from|negative|no|never|isn't|about|approximately)|n['’]t)[\s*(]*$",
    re.IGNORECASE,
)
_BEHIND = re.compile(
    r"[\s*_)\]\"'”’]*(?!(?:million|billion|thousand|hundred|trillion|dozen|percent|and|or|to|times|plus"
    r"|minus|over|squared|cubed|half|mod)\b)(?:$|[.,;:!?](?=\s|$|\*|<)|</|\(|[A-Za-z])"
)


def stated(text: str) -> str:
    r"""Return the formula that an answer states: itself, or the last one of a text.

    Empty where the text says more of the last one than that it is the answer.

    >>> stated("so $x$ is $2$ or $3$."), stated("not $5$"), stated("It costs 1,200 dollars.")
    ('2, 3', '', '1200')
    """
    text = (boxed(text) or "") if r"\boxed" in text else text
    segments = list(_SEGMENT.finditer(text[-LONGEST_ANSWER:]))
    if not segments:
        bare = text.rpartition("####")[2] if len(text) <= LONGEST_BARE else ""
        bare = " ".join(re.sub(r"^[\s=*]+|[\s*]+$", "", bare).split())
        is_formula = not _PROSE.search(bare) and _is_readable(_normal(bare))
        if bare and (is_formula or _number(bare) or _words(bare)):
            return bare
        found = read_last(text)
        return bare if found is None else _exact(found, text)
    shown = text[-LONGEST_ANSWER:]
    first = len(segments) - 1
    while first and _JOINS.fullmatch(shown, segments[first - 1].end(), segments[first].start()):
        first -= 1
    before, behind = shown[: segments[first].start()], shown[segments[-1].end() :]
    line = behind.partition("\n")[0]
    if _BINDS.search(before) or not _BEHIND.match(line) or re.search(r"\d", line):
        return ""
    return ", ".join(next(filter(None, each.groups())).strip() for each in segments[first:])


_PROSE = re.compile(
    r"(?:^|\s)(?:it|is|so|no|to|of|by|at|if|as|be|an|we|on|am|pm|up|do|go|he|us)(?=\s|$)", re.I
)
_PERCENT = r"\%"


def _exact(found: Reading, like: str) -> str:
    """Format a number as math-verify reads it; a decimal, which is rounded, stays one."""
    value = found.value * 100 if found.is_percent else found.value
    size = f"{abs(value.numerator)}"
    if value.denominator > 1 and "." in like:
        size = f"{Decimal(abs(value.numerator)) / Decimal(value.denominator):f}"
    elif value.denominator > 1:
        size = rf"\frac{{{size}}}{{{value.denominator}}}"
    return f"{'-' if value < 0 else ''}{size}{_PERCENT if found.is_percent else ''}"


_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_WRITTEN = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(?<=\d)(?:\{,\}|\\,|[\u2009\u202f])(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,:;! ]|\\q?quad(?![A-Za-z])|[~\xa0\u2009\u202f]", " "),
        ("[\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{SMALL HYPHEN-MINUS}－]", "-"),
        (r"^–(?=[\d.\\])", "-"),
        (r"\\left(?=\s*[(\[|\\])|\\right(?=\s*[)\]|\\])", ""),
        ("·|⋅", r"\\cdot "),
        ("×", r"\\times "),
        ("π|(?<![A-Za-z\\\\])pi(?![A-Za-z])", r"\\pi "),
        ("∞", r"\\infty "),
        ("≤", r"\\leq "),
        ("≥", r"\\geq "),
        ("≠", r"\\neq "),
        ("√(\\d+|[a-z])", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (r"\^\s?\(([^()]*)\)", r"^{\1}"),
        (r"\^\s?(-?\d+)", r"^{\1}"),
        # What stands beside a number in parentheses is a factor.
        (r"(?<![\w^}.])(\d+(?:\.\d+)?)\s*(?=\()", r"\1\\cdot "),
        (r"(?<=\))\s*(?=[(\d])", r"\\cdot "),
        (r"\\\$|(?<=\d)\.$|[,;]$", ""),
    )
]


def _normal(latex: str) -> str:
    """Return a formula in the spelling that math-verify reads correctly."""
    latex = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: f"^{{{run[0].translate(_RAISED)}}}", latex)
    for pattern, by in _WRITTEN:
        latex = pattern.sub(by, latex.strip())
    return latex.strip()


_COMMAND = re.compile(
    r"frac|dfrac|tfrac|cfrac|sqrt|pi|alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta"
    r"|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi"
    r"|Pi|Sigma|Phi|Psi|Omega|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln"
    r"|lg|exp|cdot|times|div|pm|mp|left|right|infty|in|cup|cap|setminus|emptyset|mathbb|le|leq"
    r"|leqslant|ge|geq|geqslant|ne|neq|lt|gt|circ|degree|binom|dbinom|tbinom|lfloor|rfloor|lceil"
    r"|rceil|lvert|rvert|begin|end|sum|prod|int|lim|to|max|min|gcd|lcm|displaystyle|text|textrm"
    r"|textbf|mathrm|mbox|vec|overline|angle"
)
_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_UNITS = (
    r"(?:(?:square|cubic|sq\.?)\s+)?(?:units?|[mckd]?m|km|in|ft|yd|mi|inch(?:es)?|f(?:ee|oo)t|yards?"
    r"|miles?|(?:kilo|centi|milli)?met(?:er|re)s?|degrees?|radians?|[mk]?g|kilograms?|grams?|pounds?"
    r"|lbs?|seconds?|s|minutes?|min|hours?|h|days?|dollars?|cents?|square|[mk]?[lL]|lit(?:er|re)s?)"
)
_TEXTS = re.compile(rf"\s*(?:and|or|{_UNITS}(?:\s*(?:/|per)\s*{_UNITS})?\.?)\s*")
_MIXED = re.compile(
    r"(?P<before>.?)(?<!\d)\d+\s*\\[dtc]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?", re.DOTALL
)
_MISREAD = re.compile(
    r"\d\s+\d|\d\s*_|\.\d+\.|(?<![\d.])0\d*[A-Za-z]|[\d}]'|[A-Za-z]'+(?!['(])|%\s*[\w\\(]"
    r"|\d\s*(?:\[|\\\{)|(?:^|[^A-Za-z\]}^_\d\s])\s*(?:\{\d[\d.]*\}\s*[\d({]|\d+\s*\{)|frac\s*\d{3}"
    r"|[^\x00-\x7f]|\\(?:sin|cos|tan|cot|sec|csc)(?=.*(?:circ|degree))",
    re.DOTALL,
)


def _is_readable(latex: str) -> bool:
    """Return whether math-verify is known to read all of a formula as it is meant."""
    texts = _TEXT.findall(latex)
    bare = re.sub(r"\\(?:begin|end)\{[pbv]?matrix\}", " ", _TEXT.sub(" ", latex))
    bare = re.sub(r"\\mathbb\s*\{?[RNZQC]\}?", " ", bare)
    commands = re.findall(r"\\([A-Za-z]+)", bare)
    letters = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+|sqrt(?=\()", " ", bare))
    return (
        all(map(_COMMAND.fullmatch, commands))
        and not letters
        and _MISREAD.search(bare) is None
        and all(map(_TEXTS.fullmatch, texts))
        and not any(
            # An improper one, or one behind what may take the number away: x^2\frac12.
            each["before"] in tuple("^_.)}")
            or each["before"].isalpha()
            or int(each[2]) >= int(each[3])
            for each in _MIXED.finditer(latex)
            if each[3] != ""
        )
    )


def _words(text: str) -> str | None:
    r"""Return the folded words of an answer such as `\text{Monday}`; None for formulas."""
    inner, folded = _TEXT.fullmatch(text.strip()), _folded(text)
    is_long = inner is not None or len(folded) > 2
    return folded if is_long and re.fullmatch(_WORD + rf"(?:[ '’-]{_WORD})*", folded) else None


_WORD = r"[^\W\d_]+"


def _folded(text: str) -> str:
    inner = _TEXT.fullmatch(text.strip())
    return " ".join((inner[1] if inner else text).split()).casefold().strip(" .()")


_SYMBOL_UNITS = re.compile(r"(?:[cmk]m|[mk]g|m[lL]|ft|in|mi|lb|oz|GB|MB|kB|yd)$")


def _number(latex: str) -> Reading | None:
    """Parse a number by the grammar, unless a letter may be a variable."""
    bare = re.sub(r"\\[A-Za-z]+|(?<=\d)[eE](?=[-+]?\d)", " ", _TEXT.sub(" ", latex))
    short = re.findall(r"(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])", bare)
    is_plain = "=" not in latex and all(map(_SYMBOL_UNITS.match, short))
    return read_whole(latex) if is_plain else None


_NAME = re.compile(r"\\?[A-Za-z]+'*(?:_(?:\w|\{\w+\}))?(?:\(\s*[A-Za-z]\s*\))?")
_EQUALS = re.compile(r"(?<![<>!\\])=")
_ITEMS = re.compile(r",|;|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_Same: TypeAlias = Callable[[str, str], bool]


def _are_equal(gold: str, answer: str, same: _Same) -> bool:
    """Return whether two formulas are equal; `same` compares those that are readable."""
    if _squeezed(gold) == _squeezed(answer):
        return True
    numbers = _number(gold), _number(answer)
    if numbers[0] and numbers[1]:
        return _are_close(numbers[0], numbers[1], is_exact="." not in gold + answer)
    if _words(gold) or _words(answer):
        return _folded(gold) == _folded(answer)
    gold, answer = (
        _normal(text if number is None else _exact(number, text))
        for text, number in zip((gold, answer), numbers, strict=True)
    )
    variables = set(re.sub(r"\\[A-Za-z]+", " ", _TEXT.sub(" ", gold + " " + answer)))
    both_cases = any(each.isupper() and each.lower() in variables for each in variables)
    if both_cases or not (_is_readable(gold) and _is_readable(answer)):
        return False
    pair = _values(gold, answer, same)
    return pair is not None and same(*pair)


def _are_close(gold: Reading, answer: Reading, *, is_exact: bool) -> bool:
    """Compare as math-verify does: decimals within six places, all else exactly."""
    tolerance = 0 if is_exact else _TOLERANCE / max(1, abs(gold.value))
    return (answer.value == 0) == (gold.value == 0) and answer.is_close(gold, float(tolerance))


def _squeezed(latex: str) -> str:
    """Remove LaTeX that changes nothing; a space between numbers is kept."""
    latex = re.sub(r"\\left|\\right|(?<!\\)\\[,:;! ]|\.$", " ", latex.replace("dfrac", "frac"))
    latex = re.sub(r"(?<!\d)\s+|\s+(?!\s|\d)", "", latex.strip())
    return re.sub(r"([_^])\{(\w)\}(?!\w)", r"\1\2", latex)


def _values(gold: str, answer: str, same: _Same) -> tuple[str, str] | None:
    """Return both without names before `=`, if only one has them; else None."""
    equations = [_EQUALS.search(each) is not None for each in (gold, answer)]
    if equations[0] == equations[1]:
        return gold, answer
    named, plain = (gold, answer) if equations[0] else (answer, gold)
    values: list[str] = []
    names: set[str] = set()
    for item in _ITEMS.split(named):
        *first, last = (part.strip() for part in _EQUALS.split(item))
        named_by = [part for part in first if _NAME.fullmatch(part)]
        if not first or not all(part in named_by or same(last, part) for part in first):
            return None
        values.append(last)
        names |= set(named_by)
    if len(values) > 1 and len(names) != 1:
        return None
    value = ", ".join(values)
    return (value, plain) if equations[0] else (plain, value)


def equal_to_any(golds: list[str], answers: list[str], imported: object) -> float:
    """Return 1 or 0, by math-verify without its own alarms; may not terminate.

    Args:
        golds: accepted answers.
        answers: candidates, one of which has to equal an accepted answer.
        imported: result of `is_imported`.

    Raises:
        ConfigError: math-verify is not installed.
    """
    if not imported:
        raise _not_installed()
    return float(any(_are_equal(gold, each, _same) for gold in golds for each in answers))


def _same(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingImports]

    def parsed(latex: str) -> list[Any]:
        config = [LatexExtractionConfig()]
        return parse(f"${latex}$", config, "no_fallback", "first_match", parsing_timeout=0)

    expected, found = parsed(gold), parsed(answer)
    if not expected or not found or not verify(expected, found, timeout_seconds=0):
        return False
    if "%" in gold + answer:
        return True
    # It takes all small numbers for one.
    try:
        a, b = complex(expected[0]), complex(found[0])
    except (TypeError, ValueError, OverflowError):
        return True
    return abs(a - b) <= _SMALL_SHARE * max(abs(a), abs(b))


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
