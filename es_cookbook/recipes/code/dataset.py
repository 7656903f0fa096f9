"""Coding problems as a dataset: generated expressions, or rows in the formats of MBPP and APPS.

Every row's own solution runs in the sandbox before training: tests that it does not pass, or that
ask for what the sandbox does not give, are found before the first generation.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError, leaves
from es_cookbook.common.terminal import plural, say
from es_cookbook.recipes.code.env import CodeGroupBuilder, Reward, question
from es_cookbook.recipes.code.problems import Problem, Split, generate_problems, read_problem
from es_cookbook.rl.data.epochs import EpochOrder
from es_cookbook.rl.data.rows import check_source, load_rows
from es_cookbook.rl.grading.sandbox import Limits, check_sandbox
from es_cookbook.rl.problem_env import render_prompt
from es_cookbook.rl.types import Datasets, Observation, RLDataset, RLDatasetBuilder, Tokenizer

Named: TypeAlias = dict[str, Problem]
"""Problems by what error messages call them."""


class CodeDataset(RLDataset):
    """Every problem once per epoch, in an order that follows from a seed."""

    def __init__(
        self, builders: Sequence[CodeGroupBuilder], problems_per_generation: int, seed: int
    ) -> None:
        if not 1 <= problems_per_generation <= len(builders):
            raise ConfigError(
                f"dataset.problems_per_generation must be from 1 to {len(builders)}, the number of "
                f"training problems, found {problems_per_generation}"
            )
        self.builders = builders
        self.problems_per_generation = problems_per_generation
        self._order = EpochOrder(len(builders), seed)

    def get_batch(self, generation: int) -> Sequence[CodeGroupBuilder]:
        """The problems of one generation."""
        indices_P = self._order.batch(generation, self.problems_per_generation)
        return [self.builders[i] for i in indices_P]

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.builders)

    async def validate(self, context_length: int) -> None:
        """Check every prompt's length, and run every problem's own solution in the sandbox."""
        say(f"running the solutions of {len(self.builders):,} training problems")
        for builder in self.builders:
            length = len(builder.observation.tokens_T)
            if length >= context_length:
                raise DataError(
                    f"{builder.name}: its prompt of {plural(length, 'token')} leaves no room in "
                    f"the engine's context of {plural(context_length, 'token')}; shorten the "
                    "prompt or raise engine.max_model_len"
                )
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
        if self.source is not None:
            check_source(self.source, "dataset.source")
        if self.test_source is not None:
            check_source(self.test_source, "dataset.test_source")

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, and render the prompts."""
        train, test = self._generated() if self.source is None else self._loaded(self.source)
        if not train:
            raise DataError(f"{self.source}: there are no training problems")
        build = functools.partial(self._group_builder, tokenizer)
        test_builders_P = [build(name, problem) for name, problem in test.items()]
        await validate_solutions(test_builders_P)
        builders = [build(name, problem) for name, problem in train.items()]
        return Datasets(
            CodeDataset(builders, self.problems_per_generation, self.seed), test_builders_P
        )

    def _generated(self) -> tuple[Named, Named]:
        """The test is the same for every seed: runs compare."""

        def stream(seed: int, split: Split, most: int) -> Named:
            problems = islice(generate_problems(seed, split), most)
            return {f"generated problem {problem.task.strip()}": problem for problem in problems}

        return stream(self.seed, "train", self.num_train), stream(0, "test", self.num_test)

    def _loaded(self, source: str) -> tuple[Named, Named]:
        rows = self._read(source, "dataset.source")
        if self.test_source is not None:
            train = dict(islice(rows, self.num_train))
            held_out = self._read(self.test_source, "dataset.test_source")
            test = dict(islice(held_out, self.num_test))
            _refuse_shared(train, test)
            return train, test
        train, test = {}, {}
        for name, problem in rows:
            is_train = problem.split == "train" or self.num_test == 0
            split, most = (train, self.num_train) if is_train else (test, self.num_test)
            if len(split) < most:
                split[name] = problem
            elif len(train) == self.num_train and len(test) == self.num_test:
                break
        return train, test

    def _read(self, source: str, option: str) -> Iterator[tuple[str, Problem]]:
        for row in load_rows(source, option=option):
            yield row.where, read_problem(row, self.max_cases)

    def _group_builder(self, tokenizer: Tokenizer, name: str, problem: Problem) -> CodeGroupBuilder:
        text = question(problem, self.shown_tests)
        tokens_T = render_prompt(tokenizer, text, chat=not problem.prefix)
        return CodeGroupBuilder(Observation(tokens_T), problem, self.reward, self.limits, name)


def _refuse_shared(train: Named, test: Named) -> None:
    """Refuse a problem that stands in both splits."""
    held_out = {problem.task: name for name, problem in test.items()}
    for name, problem in train.items():
        if problem.task in held_out:
            raise DataError(
                f"{name}: the same problem is also held out, in {held_out[problem.task]}; "
                "training and test must be disjoint"
            )
