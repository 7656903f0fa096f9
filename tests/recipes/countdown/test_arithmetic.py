"""The arithmetic parser against Python's own fractions, and against hostile text."""

from fractions import Fraction
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.recipes.countdown import arithmetic
from es_cookbook.rl.problem_env import Grade

Expression: TypeAlias = tuple[str, Fraction | None, tuple[int, ...]]
"""Text, value (None where it divides by zero), numbers used."""

numbers = st.integers(0, 999).map(lambda n: (str(n), Fraction(n), (n,)))


def _join(left: Expression, right: Expression, operator: str, space: str) -> Expression:
    """Always in parentheses, so that the text alone fixes the order of operations."""
    text = f"({left[0]}{space}{operator}{space}{right[0]})"
    a, b = left[1], right[1]
    value = None
    if a is not None and b is not None and not (operator == "/" and b == 0):
        value = {"+": a + b, "-": a - b, "*": a * b}.get(operator)
        value = a / b if value is None else value
    return text, value, left[2] + right[2]


def _extend(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    operators = st.sampled_from("+-*/")
    return st.builds(_join, children, children, operators, st.sampled_from(["", " "]))


expressions = st.recursive(numbers, _extend, max_leaves=8)


@pytest.mark.slow
@given(expressions)
def test_value_and_numbers_agree_with_fractions(expression: Expression) -> None:
    text, value, used = expression
    assert arithmetic.evaluate(text) == (None if value is None else (value, used))


@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 50)), min_size=1, max_size=8))
def test_precedence_and_associativity_agree_with_python(pairs: list[tuple[str, int]]) -> None:
    flat = "7" + "".join(f"{operator}{number}" for operator, number in pairs)
    wrapped = "Fraction(7)" + "".join(f"{op}Fraction({number})" for op, number in pairs)
    evaluated = arithmetic.evaluate(flat)
    assert evaluated is not None
    assert evaluated[0] == eval(wrapped, {"Fraction": Fraction})


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "9**9**9", "7//2", "1/0", "1/(3-3)", "9" * 1_000_000),
        "(" * 100_000 + "1" + ")" * 100_000,
        "(" * (arithmetic.MAX_DEPTH + 1) + "1" + ")" * (arithmetic.MAX_DEPTH + 1),
        *("-" * 150 + "1", "1+" * arithmetic.MAX_LENGTH + "1", "1234567890"),
        *("٣+٤", "１+２", "²+1"),  # digits of other scripts
        *("1+2=3", "1.5+2", "1_000", "0x10", "2(3)", "1 2", "1+", "*1", "(1", "1)", "()"),
        *("1\n+2", "__import__('os')"),
    ],
)
def test_what_is_not_an_answer(text: str) -> None:
    assert arithmetic.evaluate(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("-3+5", 2), ("2*-3", -6), ("--4", 4), ("+4", 4), ("8/(3-8/3)", 24), (" ( 1+2 ) / 3 ", 1)],
)
def test_signs_fractions_and_spaces(text: str, value: int) -> None:
    evaluated = arithmetic.evaluate(text)
    assert evaluated is not None
    assert evaluated[0] == value


def _grade(answer: str, numbers: tuple[int, ...] = (2, 3, 4), target: int = 10) -> Grade:
    text = f"<think>3*4=12</think>\n<answer>{answer}</answer>"
    return arithmetic.grade_countdown(text, numbers, target, arithmetic.CountdownReward())


@pytest.mark.parametrize("answer", ["3*4-2*1", "3*4", "4+4+2", "34-24"])
def test_wrong_number_multiset_or_value_is_well_formed_but_wrong(answer: str) -> None:
    grade = _grade(answer)
    assert (grade.metrics["correct"], grade.metrics["well_formed"]) == (0.0, 1.0)
    assert grade.metrics["correct_well_formed"] == 0.0
    assert grade.reward == pytest.approx(0.1)


def test_repeated_numbers_count_as_often_as_given() -> None:
    assert _grade("5+5", (5, 5), 10).metrics["correct"]
    assert not _grade("5*2", (5, 5), 10).metrics["correct"]
    assert not _grade("5+5+0*5", (5, 5, 0), 10).metrics["correct"]


def test_close_is_closer_than_one_in_a_hundred_thousand() -> None:
    assert _grade("1+1/99999999", (1, 1, 99999999), 1).metrics["correct"]
    assert not _grade("1+1/99999", (1, 1, 99999), 1).metrics["correct"]
