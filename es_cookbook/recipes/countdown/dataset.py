"""Countdown: problems that are generated, or rows of a file or a Hub set, as Envs and as a dataset.

A problem is some numbers and a target; its answer is an expression that uses each number exactly
once and equals the target. `generate_problems` makes solvable ones by combining random numbers with
random operations until one value is left, which is the target. Problems are held out by a hash of
the problem itself, for any seed; the warm start of the bundled model relies on that.

Rows have `numbers` (or `nums`, as `Jiayi-Pan/Countdown-Tasks-3to4` calls them), `target` and, where
known, `solution`. Every row that is used must be solvable: its own solution is graded, or one is
searched for.

The metrics `correct` and `format` stay apart, and `well_formed` and `correct_well_formed` let a
gain be told apart: with w the share of well-formed answers and a the share of those that are right,
correct ≈ w · a, so Δcorrect ≈ Δw · a_before (form) + w_after · Δa (answers that were well-formed
anyway becoming right).
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.countdown.arithmetic import (
    CountdownReward,
    Number,
    divide,
    grade_countdown,
)
from es_cookbook.rl.data.generated import FOLDS, Fold, SourcedDatasetBuilder, distinct
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.prompts import PREFILL_DOC, render_observation
from es_cookbook.rl.rewards.format import THINK_OPEN
from es_cookbook.rl.types import Observation, Tokenizer

if TYPE_CHECKING:
    from es_cookbook.rl.data.rows import Row

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
        """Identifies the problem: the order of the numbers is irrelevant."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def fold(self) -> int:
        """The problem's fold, a pure function of its key."""
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
    """Yield distinct solvable problems of one split, in an order that a seed decides.

    It ends only where the parameters allow no further problem, which it takes for granted after
    100,000 draws that brought nothing new.

    Args:
        seed: same seed, same stream.
        split: "train" or "test"; the two are disjoint for all seeds.
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
        results = {"+": left + right, "-": abs(left - right), "*": left * right}
        values.append(results[operator] if operator in results else left // right)
    return values[0]


class _Part(NamedTuple):
    """A value, how it is written, and how tightly it binds (1 sum, 2 product, 3 number)."""

    value: Number
    text: str
    binding: int


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """The solution of a problem.

    `first_step` is the operation done first, with its result, for example "27*4=108".
    """

    first_step: str
    expression: str


def solve(numbers: Sequence[int], target: int) -> Solution | None:
    """Return the first solution in a fixed order, or None if there is none.

    The order prefers sums to differences, products and quotients, and large numbers to small ones,
    so that a problem has one canonical solution for any order of its numbers.

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


def _search(parts: list[_Part], target: int) -> str | None:
    """Return the text of the first way to join all parts to the target."""
    if len(parts) == 1:
        return parts[0].text if parts[0].value == target else None
    found = (_search([step, *rest], target) for step, rest in _combine(parts))
    return next((text for text in found if text is not None), None)


def _combine(parts: list[_Part]) -> Iterator[tuple[_Part, list[_Part]]]:
    """Yield every pair of parts joined by every operator, with the parts that are left."""
    for operator, (i, j) in itertools.product("+-*/", itertools.combinations(range(len(parts)), 2)):
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        yield from ((step, rest) for step in _join(parts[i], parts[j], operator))


def _join(first: _Part, second: _Part, operator: str) -> Iterator[_Part]:
    """Yield the ways to join two parts: a difference and a quotient have two orders."""
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
    """Return the part as an operand, in parentheses if it binds less than `binding`."""
    return part.text if part.binding >= binding else f"({part.text})"


PromptStyle: TypeAlias = Literal["compact", "paper"]

_PAPER = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
    "<think> </think> tags. And return the final answer in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>."
)


def question(numbers: Sequence[int], target: int, style: PromptStyle) -> str:
    r"""Return the problem in words ("paper") or as the bundled model knows it ("compact").

    The shorthand is the bundled model's. It sorts the numbers, largest first: their order means
    nothing, and a small model need not learn that.

    >>> question([4, 27, 19], 50, "compact")
    '27,19,4=50\n'
    """
    if style == "compact":
        return f"{','.join(map(str, sorted(numbers, reverse=True)))}={target}\n"
    return _PAPER.format(numbers=f"[{' '.join(map(str, numbers))}]", target=target)


@dataclasses.dataclass(eq=False)
class CountdownEnv(ProblemEnv):
    """One attempt at one Countdown problem."""

    observation: Observation
    problem: Problem
    reward: CountdownReward

    def __post_init__(self) -> None:
        self.full_reward = self.reward.full

    @override
    def grade(self, text: str) -> Grade:
        numbers, target = self.problem.numbers, self.problem.target
        in_think = self.observation.opened == THINK_OPEN
        return grade_countdown(text, numbers, target, self.reward, prompt_ends_in_think=in_think)


MAX_SEARCHED_NUMBERS = 5
"""Limit on the numbers of an unsolved row: each makes the search a hundred times longer."""


@chz.chz
class CountdownDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Countdown problems for training and, disjoint from them, for the held-out test."""

    num_numbers: tuple[int, ...] = chz.field(
        default=(3,), doc="generated: how many numbers a problem may have"
    )
    max_number: int = chz.field(default=30, doc="generated: numbers are 1 to this")
    max_target: int = chz.field(default=99, doc="generated: targets are 1 to this")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model; paper: in words, as a chat if the model has one",
    )
    prefill: str = chz.field(default="", doc=PREFILL_DOC)
    reward: CountdownReward = chz.field(default_factory=CountdownReward, doc="reward weights")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "max_number", "max_target", at_least=1)
        if not self.num_numbers or not all(2 <= count <= 4 for count in self.num_numbers):
            found = self.num_numbers
            raise ConfigError(f"num_numbers must be one or more of 2, 3 and 4, found {found}")

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        problems = generate_problems(
            seed,
            "train" if fold == "train" else "test",
            num_numbers=self.num_numbers,
            max_number=self.max_number,
            max_target=self.max_target,
            fold=self.fold,
        )
        return ((f"generated problem {problem.key}", problem) for problem in problems)

    @override
    def read(self, row: "Row", tokenizer: "Tokenizer | None") -> Problem:
        numbers, target = row.integers("numbers", "nums"), row.integer("target")
        return Problem(numbers, target, row.optional_text("solution"))

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem.numbers, problem.target, self.prompt)
        chat = self.prompt == "paper"
        observation = render_observation(tokenizer, text, chat=chat, prefill=self.prefill)
        solution = problem.solution or _solution(name, problem)
        gold = f"<think>{solution} = {problem.target}</think>\n<answer>{solution}</answer>"
        make_env = functools.partial(CountdownEnv, observation, problem, self.reward)
        contents = (digest_of(f"countdown {problem.key}"),)
        gold = gold.removeprefix(observation.opened)
        return ProblemGroupBuilder(make_env, name, gold, contents=contents)


def _solution(name: str, problem: Problem) -> str:
    if (count := len(problem.numbers)) > MAX_SEARCHED_NUMBERS:
        raise DataError(
            f"{name}: a row with more than {MAX_SEARCHED_NUMBERS} numbers needs a 'solution', "
            f"found {count} numbers and none"
        )
    if (solution := solve(problem.numbers, problem.target)) is None:
        raise DataError(
            f"{name}: no expression of {list(problem.numbers)} equals {problem.target}; "
            f"every problem must be solvable"
        )
    return solution.expression
