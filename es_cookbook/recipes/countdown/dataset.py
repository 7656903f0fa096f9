"""Countdown as an Env and as a dataset: generated problems, or rows of a file or a Hub set.

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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.countdown.arithmetic import CountdownReward, grade_countdown
from es_cookbook.recipes.countdown.problems import Problem, generate_problems, solve
from es_cookbook.rl.data.generated import Fold, SourcedDatasetBuilder
from es_cookbook.rl.messages.thoughts import opened_thought
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.prompts import PREFILL_DOC, render_prompt
from es_cookbook.rl.rewards.format import THINK_OPEN, prompt_ends_in_think
from es_cookbook.rl.types import Observation, Tokenizer

if TYPE_CHECKING:
    from es_cookbook.rl.data.rows import Row

PromptStyle: TypeAlias = Literal["compact", "paper"]

_PAPER = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
    "<think> </think> tags. And return the final answer in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>."
)


def question(numbers: Sequence[int], target: int, style: PromptStyle) -> str:
    r"""The problem in words ("paper", from the literature) or in a shorthand ("compact").

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
    numbers: tuple[int, ...]
    target: int
    reward: CountdownReward
    prompt_ends_in_think: bool = False

    def __post_init__(self) -> None:
        self.full_reward = self.reward.full

    @override
    def grade(self, text: str) -> Grade:
        problem = self.numbers, self.target, self.reward
        return grade_countdown(text, *problem, prompt_ends_in_think=self.prompt_ends_in_think)


MAX_SEARCHED_NUMBERS = 5
"""Most numbers of a row without a solution: each makes the search a hundred times longer."""


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
    reward: CountdownReward = chz.field(default_factory=CountdownReward, doc="how answers are paid")

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
        tokens_T = render_prompt(tokenizer, text, chat=chat, prefill=self.prefill)
        ends_in_think = prompt_ends_in_think(tokenizer, tokens_T)
        solution = problem.solution or _solution(name, problem)
        gold = f"<think>{solution} = {problem.target}</think>\n<answer>{solution}</answer>"
        given = Observation(tokens_T), problem.numbers, problem.target, self.reward, ends_in_think
        gold = gold.removeprefix(THINK_OPEN) if ends_in_think else gold
        contents = (digest_of(f"countdown {problem.key}"),)
        make_env = functools.partial(CountdownEnv, *given)
        opened = opened_thought(tokenizer, tokens_T, self.prefill)
        return ProblemGroupBuilder(make_env, name, gold, contents=contents, opened=opened)


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
