"""Mathematical problems as a dataset: generated, or rows as of GSM8K, MATH and DeepScaleR.

Every row's own answer is graded before the first generation: what cannot be read or cannot earn the
full reward is refused by file and line. Metrics are reported by MATH's levels and types too.
"""

import functools
from collections.abc import Iterator
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.generated import FOLDS, Fold, SourcedDatasetBuilder
from es_cookbook.recipes.math.env import MathEnv, PromptStyle, gold_text, question, reward_of
from es_cookbook.recipes.math.problems import Problem, read_problem
from es_cookbook.recipes.math.word_problems import generate_problems
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of, render_prompt
from es_cookbook.rl.rewards.format import prompt_ends_in_think
from es_cookbook.rl.types import Observation, Tokenizer


@chz.chz
class MathDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Mathematical problems for training and, disjoint from them, for the held-out test."""

    num_train: int = chz.field(default=10_000, doc="most training problems used")
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

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "format_weight", at_least=0, at_most=1)

    @override
    def check(self) -> None:
        super().check()
        if self.grading == "math":
            reward_of(self.prompt, is_number=False).check()

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        """They are read from their rows, as problems of others are."""
        others = [each for each in range(FOLDS) if each != self.fold]
        for made in generate_problems(seed, others if fold == "train" else [self.fold]):
            name = f"generated problem {made.question!r}"
            yield name, read_problem(Row(name, made.row))

    @override
    def read(self, row: Row, tokenizer: Tokenizer) -> Problem:
        return read_problem(row)

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
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
