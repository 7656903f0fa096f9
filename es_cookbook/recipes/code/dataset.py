"""Coding problems as a dataset: generated expressions, or rows in the formats of MBPP and APPS.

Every row's own solution runs in the sandbox before training: tests that it does not pass, or that
ask for what the sandbox does not give, are found before the first generation.
"""

from collections.abc import Iterator, Sequence

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError, leaves
from es_cookbook.common.terminal import say
from es_cookbook.recipes.code.env import CodeProblem, Reward, coding_problem, question
from es_cookbook.recipes.code.problems import Problem, generate_problems, read_problem
from es_cookbook.recipes.generated import Fold, SourcedDatasetBuilder
from es_cookbook.recipes.recipe import built_field
from es_cookbook.rl.data.problem_dataset import ProblemDataset, check_prompt
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.grading.sandbox import Limits, check_sandbox
from es_cookbook.rl.problem_env import ProblemGroupBuilder, render_prompt
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, Observation, RLDataset, Tokenizer


class CodeDataset(ProblemDataset):
    """Problems whose own solutions run in the sandbox before training."""

    @override
    async def validate(self, context_length: int) -> None:
        """Check every prompt's length, and run every problem's own solution in the sandbox."""
        say(f"running the solutions of {len(self.builders):,} training problems")
        problems_P = [each for each in self.builders if isinstance(each, CodeProblem)]
        for problem in problems_P:
            length = len((await problem.make_env().initial_observation()).tokens_T)
            check_prompt(problem.name, length, context_length)
        await validate_solutions(problems_P)


async def validate_solutions(problems_P: Sequence[EnvGroupBuilder]) -> None:
    """Check, several at a time, that every solution that is known passes its problem's tests.

    Raises:
        DataError: One that does not; names the problem.
        SandboxError: There is no sandbox here.
    """

    async def check(builder: CodeProblem) -> None:
        grade = await builder.grade(builder.problem.solution)
        if grade.reward < 1:
            said = grade.logs.get("stderr", "").strip().splitlines()[-1:]
            why = f": {said[0]}" if said else ""
            raise DataError(
                f"{builder.name}: its own solution passes {grade.metrics['passed']:.0%} of its "
                f"tests in the sandbox{why}"
            )

    try:
        async with anyio.create_task_group() as tasks:
            for builder in problems_P:
                if isinstance(builder, CodeProblem) and builder.problem.solution is not None:
                    tasks.start_soon(check, builder)
    except BaseExceptionGroup as errors:
        raise next(leaves(errors)) from None


@chz.chz
class CodeDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Coding problems for training and, disjoint from them, for the held-out test."""

    num_train: int = chz.field(default=500, doc="most training problems used")
    num_test: int = chz.field(default=100, doc="most held-out problems used; 0 for none")
    problems_per_generation: int = chz.field(default=16, doc="problems in a batch")
    shown_tests: int = chz.field(
        default=1, doc="asserts that the prompt shows; cases it never does"
    )
    max_cases: int = chz.field(default=8, doc="inputs and outputs used of a problem, the first")
    reward: Reward = chz.field(
        default="share", doc="share: of the tests that pass; all: 1 if every test does, else 0"
    )
    limits: Limits = built_field(
        Limits, "what an answer may use, in all asserts together or in each case"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "max_cases", at_least=1)
        check_range(self, "shown_tests", at_least=0)

    @override
    def check(self) -> None:
        check_sandbox()
        super().check()

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        for problem in generate_problems(seed, is_test=fold != "train", fold=self.fold):
            yield f"generated problem {problem.task.strip()}", problem

    @override
    def read(self, row: Row, tokenizer: Tokenizer) -> Problem:
        return read_problem(row, self.max_cases)

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem, self.shown_tests)
        tokens_T = render_prompt(tokenizer, text, chat=not problem.prefix)
        return coding_problem(Observation(tokens_T), problem, self.reward, self.limits, name)

    @override
    def dataset(
        self, train: Sequence[ProblemGroupBuilder], test_P: Sequence[ProblemGroupBuilder]
    ) -> RLDataset:
        return CodeDataset(train, self.problems_per_generation, self.seed, test_P)

    @override
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        datasets = await super().__call__(tokenizer)
        await validate_solutions(datasets.test_P)
        return datasets
