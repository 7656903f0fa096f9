"""Countdown problems as a dataset: generated, or from a local file or a Hub set.

Rows have `numbers` (or `nums`, as `Jiayi-Pan/Countdown-Tasks-3to4` calls them), `target` and, where
known, `solution`. Every row that is used must be solvable: its own solution is graded, or one is
searched for.
"""

import functools
from collections.abc import Iterator

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.countdown.env import CountdownEnv, PromptStyle, question
from es_cookbook.recipes.countdown.problems import Problem, generate_problems, solve
from es_cookbook.recipes.generated import Fold, SourcedDatasetBuilder
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of, render_prompt
from es_cookbook.rl.rewards.arithmetic import CountdownReward
from es_cookbook.rl.rewards.format import THINK_OPEN, prompt_ends_in_think
from es_cookbook.rl.types import Observation, Tokenizer

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
    def read(self, row: Row, tokenizer: Tokenizer) -> Problem:
        numbers, target = row.integers("numbers", "nums"), row.integer("target")
        return Problem(numbers, target, row.optional_text("solution"))

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem.numbers, problem.target, self.prompt)
        tokens_T = render_prompt(tokenizer, text, chat=self.prompt == "paper")
        ends_in_think = prompt_ends_in_think(tokenizer, tokens_T)
        solution = problem.solution or _solution(name, problem)
        gold = f"<think>{solution} = {problem.target}</think>\n<answer>{solution}</answer>"
        given = Observation(tokens_T), problem.numbers, problem.target, self.reward, ends_in_think
        gold = gold.removeprefix(THINK_OPEN) if ends_in_think else gold
        contents = (digest_of(f"countdown {problem.key}"),)
        make_env = functools.partial(CountdownEnv, *given)
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
