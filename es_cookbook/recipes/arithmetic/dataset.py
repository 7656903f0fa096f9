"""Additions as a dataset: generated problems, and held-out ones that no seed trains on."""

import functools
from collections.abc import Iterator

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.arithmetic.env import ArithmeticEnv, PromptStyle, gold_answer, question
from es_cookbook.recipes.arithmetic.problems import Problem, generate_problems
from es_cookbook.recipes.generated import Fold, GeneratedDatasetBuilder
from es_cookbook.rl.problem_env import ProblemGroupBuilder, render_prompt
from es_cookbook.rl.types import Observation, Tokenizer


@chz.chz
class ArithmeticDatasetBuilder(GeneratedDatasetBuilder):
    """Additions for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=1000, doc="most held-out problems used; 0 for none")
    num_terms: int = chz.field(default=2, doc="numbers that are added; 2 to 9")
    num_digits: int = chz.field(default=3, doc="digits of each; 1 to 30")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, answered ones first; "
        "words: as a chat if the model has one, answered as numbers are written",
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_terms", at_least=2, at_most=9)
        check_range(self, "num_digits", at_least=1, at_most=30)

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        shape = {"num_terms": self.num_terms, "num_digits": self.num_digits}
        for problem in generate_problems(seed, fold, **shape):
            yield self._group_builder(tokenizer, problem)

    def _group_builder(self, tokenizer: Tokenizer, problem: Problem) -> ProblemGroupBuilder:
        text = question(problem.terms, self.prompt)
        name = f"generated problem {question(problem.terms, 'compact')}"
        tokens_T = render_prompt(tokenizer, text, chat=self.prompt == "words")
        if not tokens_T:
            raise DataError(f"{name}: the model's tokenizer makes no tokens of it")
        env = functools.partial(ArithmeticEnv, Observation(tokens_T), problem.terms, self.prompt)
        return ProblemGroupBuilder(env, name, gold_answer(problem.terms, self.prompt))
