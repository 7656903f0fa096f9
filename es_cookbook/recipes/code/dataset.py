"""Coding problems as a dataset: generated expressions, or rows in the formats of MBPP and APPS.

Every row's own solution runs in the sandbox before training: tests that it does not pass, or that
ask for what the sandbox does not give, are found before the first generation.
"""

import functools
from collections.abc import Sequence
from itertools import islice

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError, leaves
from es_cookbook.common.terminal import say
from es_cookbook.recipes.code.env import CodeGroupBuilder, Reward, question
from es_cookbook.recipes.code.problems import Problem, generate_problems, read_problem
from es_cookbook.rl.data.problem_dataset import EpochDataset, check_prompt
from es_cookbook.rl.data.rows import check_sources
from es_cookbook.rl.data.splits import Split, load_splits
from es_cookbook.rl.grading.sandbox import Limits, check_sandbox
from es_cookbook.rl.problem_env import render_prompt
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer


class CodeDataset(EpochDataset[CodeGroupBuilder]):
    """Problems whose own solutions run in the sandbox before training."""

    async def validate(self, context_length: int) -> None:
        """Check every prompt's length, and run every problem's own solution in the sandbox."""
        say(f"running the solutions of {len(self.builders):,} training problems")
        for builder in self.builders:
            check_prompt(builder.name, len(builder.observation.tokens_T), context_length)
        await validate_solutions(self.builders)


async def validate_solutions(builders: Sequence[CodeGroupBuilder]) -> None:
    """Check, several at a time, that every solution that is known passes its problem's tests.

    Raises:
        DataError: One that does not; names the problem.
        SandboxError: There is no sandbox here.
    """

    async def check(builder: CodeGroupBuilder) -> None:
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
            for builder in builders:
                if builder.problem.solution is not None:
                    tasks.start_soon(check, builder)
    except BaseExceptionGroup as errors:
        raise next(leaves(errors)) from None


@chz.chz
class CodeDatasetBuilder(RLDatasetBuilder):
    """Coding problems for training and, disjoint from them, for the held-out test."""

    source: str | None = chz.field(
        default=None, doc=".jsonl or .parquet file, or Hub set; None generates expressions"
    )
    test_source: str | None = chz.field(
        default=None,
        doc="the same for the test; None holds a tenth of the problems out of `source`",
    )
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
    limits: Limits = chz.field(
        default_factory=Limits,
        blueprint_unspecified=Limits,
        doc="what an answer may use, in all asserts together or in each case",
    )
    seed: int = chz.field(default=0, doc="of the training problems generated and of their order")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_train", "problems_per_generation", "max_cases", at_least=1)
        check_range(self, "num_test", "shown_tests", at_least=0)
        if self.test_source is not None and self.source is None:
            raise ConfigError(
                "test_source needs source=... beside it: generated problems hold out their own"
            )

    @override
    def check(self) -> None:
        check_sandbox()
        check_sources(self.source, self.test_source)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, and render the prompts."""
        if self.source is None:
            train, test = self._generated()
        else:
            read = functools.partial(read_problem, max_cases=self.max_cases)
            most = {"num_train": self.num_train, "num_test": self.num_test}
            train, test = load_splits(self.source, self.test_source, read, **most)
        if not train:
            raise DataError(f"{self.source}: there are no training problems")
        build = functools.partial(self._group_builder, tokenizer)
        test_builders_P = [build(name, problem) for name, problem in test.items()]
        await validate_solutions(test_builders_P)
        builders = [build(name, problem) for name, problem in train.items()]
        return Datasets(
            CodeDataset(builders, self.problems_per_generation, self.seed), test_builders_P
        )

    def _generated(self) -> tuple[dict[str, Problem], dict[str, Problem]]:
        """The test is the same for every seed: runs compare."""

        def stream(seed: int, split: Split, most: int) -> dict[str, Problem]:
            problems = islice(generate_problems(seed, split), most)
            return {f"generated problem {problem.task.strip()}": problem for problem in problems}

        return stream(self.seed, "train", self.num_train), stream(0, "test", self.num_test)

    def _group_builder(self, tokenizer: Tokenizer, name: str, problem: Problem) -> CodeGroupBuilder:
        text = question(problem, self.shown_tests)
        tokens_T = render_prompt(tokenizer, text, chat=not problem.prefix)
        return CodeGroupBuilder(Observation(tokens_T), problem, self.reward, self.limits, name)
