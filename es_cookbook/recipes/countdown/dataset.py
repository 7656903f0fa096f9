"""Countdown problems as a dataset: generated, or from a local file or a Hub set.

Rows have `numbers` (or `nums`, as `Jiayi-Pan/Countdown-Tasks-3to4` calls them), `target` and, where
known, `solution`. Every row that is used must be solvable: its own solution is graded, or one is
searched for.
"""

import functools
from itertools import islice

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.countdown.env import CountdownEnv, PromptStyle, question
from es_cookbook.recipes.countdown.problems import (
    Problem,
    Split,
    generate_problems,
    solve,
)
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row, check_sources
from es_cookbook.rl.data.splits import load_splits
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of, render_prompt
from es_cookbook.rl.rewards.arithmetic import CountdownReward
from es_cookbook.rl.rewards.format import THINK_OPEN, prompt_ends_in_think
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer

MAX_SEARCHED_NUMBERS = 5
"""Most numbers of a row without a solution: each makes the search a hundred times longer."""


@chz.chz
class CountdownDatasetBuilder(RLDatasetBuilder):
    """Countdown problems for training and, disjoint from them, for the held-out test."""

    source: str | None = chz.field(
        default=None, doc=".jsonl or .parquet file, or Hub set; None generates problems"
    )
    test_source: str | None = chz.field(
        default=None,
        doc="the same for the test; None holds a tenth of the problems out of `source`",
    )
    num_train: int = chz.field(default=4000, doc="most training problems used")
    num_test: int = chz.field(default=500, doc="most held-out problems used; 0 for none")
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
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
    seed: int = chz.field(default=0, doc="of the training problems generated and of their order")

    @chz.validate
    def _ranges(self) -> None:
        counts = ("num_train", "problems_per_generation", "max_number", "max_target")
        check_range(self, *counts, at_least=1)
        check_range(self, "num_test", at_least=0)
        if not self.num_numbers or not all(2 <= count <= 4 for count in self.num_numbers):
            found = self.num_numbers
            raise ConfigError(f"num_numbers must be one or more of 2, 3 and 4, found {found}")
        if self.test_source is not None and self.source is None:
            raise ConfigError(
                "test_source needs source=... beside it: generated problems hold out their own"
            )

    @override
    def check(self) -> None:
        check_sources(self.source, self.test_source)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, solve what has no solution, render the prompts."""
        if self.source is None:
            train, test = self._generated()
        else:
            most = {"num_train": self.num_train, "num_test": self.num_test}
            train, test = load_splits(self.source, self.test_source, _read, **most)
        if not train:
            raise DataError(f"{self.source or 'the generator'}: there are no training problems")
        build = functools.partial(self._group_builder, tokenizer)
        train_builders = [build(name, problem) for name, problem in train.items()]
        test_builders_P = [build(name, problem) for name, problem in test.items()]
        dataset = ProblemDataset(
            train_builders, self.problems_per_generation, self.seed, test_builders_P
        )
        return Datasets(dataset, test_builders_P)

    def _generated(self) -> tuple[dict[str, Problem], dict[str, Problem]]:
        """Train and test problems by name; the test is the same for every seed: runs compare."""

        def stream(seed: int, split: Split, most: int) -> dict[str, Problem]:
            problems = generate_problems(
                seed,
                split,
                num_numbers=self.num_numbers,
                max_number=self.max_number,
                max_target=self.max_target,
            )
            return {f"generated problem {p.key}": p for p in islice(problems, most)}

        return stream(self.seed, "train", self.num_train), stream(0, "test", self.num_test)

    def _group_builder(
        self, tokenizer: Tokenizer, name: str, problem: Problem
    ) -> ProblemGroupBuilder:
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


def _read(row: Row) -> Problem:
    numbers, target = row.integers("numbers", "nums"), row.integer("target")
    return Problem(numbers, target, row.optional_text("solution"))


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
