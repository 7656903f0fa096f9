"""Countdown problems: what one is, how they are made, solved and split.

A problem is some numbers and a target; its answer is an expression that uses each number exactly
once and equals the target. `generate_problems` makes solvable ones by combining random numbers with
random operations until one value is left, which is the target. Problems are held out by a hash of
the problem itself: whoever generates them, with whatever seed, agrees on which ones no one trains
on. The warm start of the bundled model relies on that.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.countdown.arithmetic import Number, divide
from es_cookbook.rl.data.generated import FOLDS, distinct

ProblemKey: TypeAlias = tuple[tuple[int, ...], int]

Split: TypeAlias = Literal["train", "test"]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One Countdown problem, with an expression that solves it where one is known."""

    numbers: tuple[int, ...]
    target: int
    solution: str | None = None

    @property
    def key(self) -> ProblemKey:
        """What makes it the problem it is: the order of the numbers means nothing."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def fold(self) -> int:
        """Which fold the problem belongs to, a pure function of its key."""
        numbers, target = self.key
        return derive_seed(0, "countdown/split", *numbers, target) % FOLDS


def generate_problems(
    seed: int,
    split: Split,
    *,
    num_numbers: Sequence[int] = (3,),
    max_number: int = 30,
    max_target: int = 99,
    fold: int = 0,
) -> Iterator[Problem]:
    """Endless seeded stream of distinct solvable problems of one split.

    It ends only where the parameters allow no further problem, which it takes for granted after
    100,000 draws that brought nothing new.

    Args:
        seed: same seed, same stream.
        split: "train" or "test"; the two are disjoint whatever the seeds.
        num_numbers: how many numbers a problem may have, each equally likely.
        max_number: numbers are 1 to this.
        max_target: targets are 1 to this.
        fold: which fold is held out.
    """
    rng = random.Random(derive_seed(seed, f"countdown/{split}"))

    def draw() -> Problem | None:
        numbers = tuple(rng.randint(1, max_number) for _ in range(rng.choice(num_numbers)))
        target = _random_target(rng, numbers)
        return Problem(numbers, target) if 1 <= target <= max_target else None

    def is_wanted(problem: Problem) -> bool:
        return (problem.fold == fold) == (split == "test")

    return distinct(draw, is_wanted, lambda problem: problem.key)


def _random_target(rng: random.Random, numbers: Sequence[int]) -> int:
    """Combine random pairs until one value is left; 0 where a division is not whole."""
    values = list(numbers)
    while len(values) > 1:
        rng.shuffle(values)
        left, right = values.pop(), values.pop()
        operator = rng.choice("+-*/")
        if operator == "/" and (right == 0 or left % right):
            return 0
        values.append(
            left + right if operator == "+"
            else abs(left - right) if operator == "-"
            else left * right if operator == "*"
            else left // right
        )  # fmt: skip
    return values[0]


class _Part(NamedTuple):
    """A value, how it is written, and how tightly it binds (1 sum, 2 product, 3 number)."""

    value: Number
    text: str
    binding: int


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """How a problem is solved.

    `first_step` is the operation done first, with its result, for example "27*4=108".
    """

    first_step: str
    expression: str

    @property
    def demonstration(self) -> str:
        """The whole answer, as a small model is taught it."""
        return f"<think>{self.first_step}</think><answer>{self.expression}</answer>"


def solve(numbers: Sequence[int], target: int) -> Solution | None:
    """The first solution in a fixed order, or None where there is none.

    The order prefers sums to differences, products and quotients, and large numbers to small ones,
    so that a problem has one canonical solution whatever the order of its numbers.

    >>> solve([4, 27, 58], 50)
    Solution(first_step='27*4=108', expression='27*4-58')
    """
    parts = [_Part(number, str(number), 3) for number in sorted(numbers, reverse=True)]
    if len(parts) == 1:
        return Solution(f"{numbers[0]}", f"{numbers[0]}") if numbers[0] == target else None
    for step, rest in _combine(parts):
        if (text := _search([step, *rest], target)) is not None:
            return Solution(f"{step.text}={step.value}", text)
    return None


def solved_problems(seed: int) -> Iterator[tuple[Problem, Solution]]:
    """Training problems of `generate_problems`, with their canonical solutions."""
    for problem in generate_problems(seed, "train"):
        if (solution := solve(problem.numbers, problem.target)) is not None:
            yield problem, solution


def _search(parts: list[_Part], target: int) -> str | None:
    """Text of the first way to join all parts to the target."""
    if len(parts) == 1:
        return parts[0].text if parts[0].value == target else None
    found = (_search([step, *rest], target) for step, rest in _combine(parts))
    return next((text for text in found if text is not None), None)


def _combine(parts: list[_Part]) -> Iterator[tuple[_Part, list[_Part]]]:
    """Every pair of parts joined by every operator, with the parts that are left."""
    for operator, (i, j) in itertools.product("+-*/", itertools.combinations(range(len(parts)), 2)):
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        yield from ((step, rest) for step in _join(parts[i], parts[j], operator))


def _join(first: _Part, second: _Part, operator: str) -> Iterator[_Part]:
    """The one or two ways to join two parts: a difference and a quotient have two orders."""
    large, small = (first, second) if first.value >= second.value else (second, first)
    if operator == "+":
        yield _Part(large.value + small.value, f"{large.text}+{small.text}", 1)
    elif operator == "*":
        yield _Part(large.value * small.value, f"{_in(large, 2)}*{_in(small, 2)}", 2)
    else:
        for left, right in ((large, small), (small, large)):
            if operator == "-":
                yield _Part(left.value - right.value, f"{left.text}-{_in(right, 2)}", 1)
            elif right.value != 0:
                value = divide(left.value, right.value)
                yield _Part(value, f"{_in(left, 2)}/{_in(right, 3)}", 2)


def _in(part: _Part, binding: int) -> str:
    """The part as an operand: in parentheses where it binds less tightly than `binding`."""
    return part.text if part.binding >= binding else f"({part.text})"
