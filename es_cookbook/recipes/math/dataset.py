"""Mathematical problems as a dataset: generated, or rows as of GSM8K, MATH and DeepScaleR.

Every row's own answer is graded before the first generation: what cannot be read or cannot earn the
full reward is refused by file and line. Metrics are reported by MATH's levels and types too.
"""

import functools
from itertools import islice
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.math.env import MathEnv, PromptStyle, gold_text, question, reward_of
from es_cookbook.recipes.math.problems import FOLDS, Problem, read_problem
from es_cookbook.recipes.math.word_problems import generate_problems
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row, check_sources
from es_cookbook.rl.data.splits import load_splits
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of, render_prompt
from es_cookbook.rl.rewards.format import prompt_ends_in_think
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer


@chz.chz
class MathDatasetBuilder(RLDatasetBuilder):
    """Mathematical problems for training and, disjoint from them, for the held-out test."""

    source: str | None = chz.field(
        default=None, doc=".jsonl or .parquet file, or Hub set; None generates word problems"
    )
    test_source: str | None = chz.field(
        default=None,
        doc="the same for the test; None holds a tenth of the problems out of `source`",
    )
    num_train: int = chz.field(default=10_000, doc="most training problems used")
    num_test: int = chz.field(default=500, doc="most held-out problems used; 0 for none")
    fold: int = chz.field(default=0, doc="which tenth is held out: 0 to 9")
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    prompt: PromptStyle = chz.field(
        default="plain",
        doc=r"plain: the question alone, answered in \boxed{}, for the bundled model; boxed: asks "
        "for the box; tags: asks for <think> and <answer>",
    )
    grading: Literal["auto", "number", "math"] = chz.field(
        default="auto",
        doc="number: compare the last number of the answer; math: by math-verify; auto: GSM8K's "
        "rows as numbers, others by math-verify",
    )
    format_weight: float = chz.field(default=0.1, doc="share of the reward for the form")
    seed: int = chz.field(default=0, doc="of the training problems generated and of their order")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", at_least=0)
        check_range(self, "fold", at_least=0, at_most=FOLDS - 1)
        check_range(self, "format_weight", at_least=0, at_most=1)
        if self.test_source is not None and self.source is None:
            raise ConfigError(
                "test_source needs source=... beside it: generated problems hold out their own"
            )

    @override
    def check(self) -> None:
        check_sources(self.source, self.test_source)
        if self.grading == "math":
            reward_of(self.prompt, is_number=False).check()

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, and render the prompts."""
        if self.source is None:
            train, test = self._generated()
        else:
            read = functools.partial(read_problem, held_out_fold=self.fold)
            most = {"num_train": self.num_train, "num_test": self.num_test}
            train, test = load_splits(self.source, self.test_source, read, **most)
        if not train:
            raise DataError(f"{self.source}: there are no training problems")
        build = functools.partial(self._group_builder, tokenizer)
        builders = [build(name, problem) for name, problem in train.items()]
        test_P = [build(name, problem) for name, problem in test.items()]
        dataset = ProblemDataset(builders, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)

    def _generated(self) -> tuple[dict[str, Problem], dict[str, Problem]]:
        """The test is the same for every seed: runs compare. Which fold a problem is in is its own.

        They are read from their rows, as problems of others are.
        """

        def stream(seed: int, folds: list[int], most: int) -> dict[str, Problem]:
            problems = islice(generate_problems(seed, folds), most)
            named = {f"generated problem {p.question!r}": p.row for p in problems}
            return {name: read_problem(Row(name, row)) for name, row in named.items()}

        others = [fold for fold in range(FOLDS) if fold != self.fold]
        return (
            stream(self.seed, others, self.num_train),
            stream(0, [self.fold], self.num_test),
        )

    def _group_builder(
        self, tokenizer: Tokenizer, name: str, problem: Problem
    ) -> ProblemGroupBuilder:
        tokens_T = render_prompt(tokenizer, question(problem.question, self.prompt), chat=True)
        ends_in_think = prompt_ends_in_think(tokenizer, tokens_T)
        is_number = problem.is_number if self.grading == "auto" else self.grading == "number"
        reward = reward_of(self.prompt, is_number=is_number)
        try:
            reward.check_row({"answer": problem.gold})
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        given = name, problem.gold, reward, self.prompt, self.format_weight, ends_in_think
        return ProblemGroupBuilder(
            functools.partial(MathEnv, Observation(tokens_T), *given),
            name,
            gold=gold_text(problem.gold, self.prompt, prompt_ends_in_think=ends_in_think),
            problem_tags=problem.tags,
            contents=(digest_of(problem.key),),
        )
