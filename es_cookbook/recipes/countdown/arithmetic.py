"""Arithmetic in a model's answer, graded without executing it.

`evaluate` is a recursive-descent parser over exact rationals for `+ - * /`, parentheses and whole
numbers. Lengths are checked before anything is parsed and nesting while it is, so `9**9**9`, ten
thousand parentheses, a megabyte of digits and division by zero all cost microseconds and are simply
not an answer. Python's own `ast.parse` takes longer than all of this, refuses leading zeros and
bounds no nesting.

    expression = term { ("+" | "-") term }
    term       = factor { ("*" | "/") factor }
    factor     = ("+" | "-") factor | "(" expression ")" | digits

`CountdownReward` grades a Countdown answer (TinyZero's task: use each number exactly once to make
the target) and separates correctness, the answer's form and the tags' format. Left out on
purpose: powers, floor division, decimal points and names, which the task does not allow.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeAlias

import chz

from es_cookbook.common.checks import in_range
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.format import extract_answer, paper_format_reward, tag_format_reward
from es_cookbook.rl.types import ANSWER

Number: TypeAlias = int | Fraction

MAX_LENGTH = 200
"""Longest expression read, in characters."""
MAX_DEPTH = 20
"""Deepest nesting of parentheses and signs."""
MAX_DIGITS = 9
"""Longest whole number."""
TOLERANCE = Fraction(1, 100_000)
"""Distance from the target that counts as equal, as in the literature; moot with rationals."""

_TOKENS = re.compile(r"[0-9]+|[-+*/()]")
_ALLOWED = re.compile(r"[-+*/() 0-9]+")


class _NotAnExpressionError(Exception):
    """Raised inside the parser only."""


class _Parser:
    """One pass over the tokens of one expression; `numbers` collects the whole numbers in order."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = [*tokens, ""]  # the empty token ends every rule
        self.position = 0
        self.numbers: list[int] = []

    def expression(self, depth: int, level: int = 0) -> Number:
        """Parse operands joined from the left by sums (level 0) or products (1)."""
        if level == len(_OPERATORS):
            return self.factor(depth)
        value = self.expression(depth, level + 1)
        while operate := _OPERATORS[level].get(self.tokens[self.position]):
            self.position += 1
            value = operate(value, self.expression(depth, level + 1))
        return value

    def factor(self, depth: int) -> Number:
        token = self.tokens[self.position]
        self.position += 1
        if token.isdigit() and len(token) <= MAX_DIGITS:
            self.numbers.append(int(token))
            return self.numbers[-1]
        if depth == MAX_DEPTH:
            raise _NotAnExpressionError
        if token == "(":
            value = self.expression(depth + 1)
            if self.tokens[self.position] != ")":
                raise _NotAnExpressionError
            self.position += 1
            return value
        if token == "-":
            return -self.factor(depth + 1)
        if token == "+":
            return self.factor(depth + 1)
        raise _NotAnExpressionError


def divide(left: Number, right: Number) -> Number:
    """Return the exact quotient; an integer if it is whole, because fractions are slow.

    Raises:
        ZeroDivisionError: `right` is 0.
    """
    quotient = Fraction(left, right)
    return quotient.numerator if quotient.denominator == 1 else quotient


_OPERATORS: Sequence[Mapping[str, Callable[[Number, Number], Number]]] = (
    {"+": lambda left, right: left + right, "-": lambda left, right: left - right},
    {"*": lambda left, right: left * right, "/": divide},
)


def evaluate(expression: str) -> tuple[Number, tuple[int, ...]] | None:
    """Return an expression's exact value and its whole numbers; None for other text.

    >>> evaluate("(1 + 2) / 6")
    (Fraction(1, 2), (1, 2, 6))
    >>> evaluate("9**9**9") is None and evaluate("1/0") is None
    True
    """
    if len(expression) > MAX_LENGTH or not _ALLOWED.fullmatch(expression):
        return None
    parser = _Parser(_TOKENS.findall(expression))
    try:
        value = parser.expression(0)
    except (_NotAnExpressionError, ZeroDivisionError):
        return None
    if parser.tokens[parser.position] != "":
        return None
    return value, tuple(parser.numbers)


@chz.chz
class AnswerReward:
    """The reward of an answer: `answer_weight` · answer + `format_weight` · format."""

    answer_weight: float = chz.field(default=0.9, doc="reward of a correct answer")
    format_weight: float = chz.field(
        default=0.1, doc="reward of the full format; parts of it earn a share"
    )

    _weights = in_range("answer_weight", "format_weight", at_least=0)

    @property
    def full(self) -> float:
        """Reward of a correct answer in the right form."""
        return self.answer_weight + self.format_weight


@chz.chz
class CountdownReward(AnswerReward):
    """The reward of a Countdown answer: `answer_weight` · correct + `format_weight` · format."""

    form: Literal["tags", "paper"] = chz.field(
        default="tags",
        doc="tags: share of correct tags; paper: 1 if whole, or 0.1 thought + 0.5 answer (as in "
        "arXiv 2509.24372, with answer_weight=1)",
    )


def grade_countdown(
    text: str,
    numbers: Sequence[int],
    target: int,
    reward: CountdownReward,
    *,
    prompt_ends_in_think: bool = False,
) -> Grade:
    """Grade a model's answer to one Countdown problem.

    Metrics: `correct`, the answer uses each number exactly once and equals the target; `format`,
    the form of the whole text, in [0, 1], for any answer; `well_formed`, full format, and the
    answer parses as an expression, right or wrong; and whether it is both, `correct_well_formed`.

    `text` is the whole answer, thought included; `prompt_ends_in_think` says that the prompt
    already holds the opening `<think>`.

    >>> text = "<think>3*4=12</think><answer>3*4-2</answer>"
    >>> grade_countdown(text, [2, 3, 4], 10, CountdownReward()).reward
    1.0
    """
    answer = extract_answer(text)
    evaluated = evaluate(answer) if answer is not None else None
    correct = (
        evaluated is not None
        and sorted(evaluated[1]) == sorted(numbers)
        and abs(evaluated[0] - target) < TOLERANCE
    )
    format_reward = paper_format_reward if reward.form == "paper" else tag_format_reward
    format_score = format_reward(text, prompt_ends_in_think=prompt_ends_in_think)
    well_formed = format_score == 1.0 and evaluated is not None
    metrics = {
        "correct": float(correct),
        "format": format_score,
        "well_formed": float(well_formed),
        "correct_well_formed": float(correct and well_formed),
    }
    earned = reward.answer_weight * correct + reward.format_weight * format_score
    if answer is None or evaluated is None:
        return Grade(earned, metrics)
    return Grade(earned, metrics, {ANSWER: "".join(answer.split())})
