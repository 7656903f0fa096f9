"""Additions as a dataset: generated problems, and held-out ones that no seed trains on."""

import functools
from itertools import islice
from typing import Literal

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.arithmetic.env import ArithmeticEnv, PromptStyle, gold_answer, question
from es_cookbook.recipes.arithmetic.problems import Fold, Problem, generate_problems
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder, render_prompt
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer


@chz.chz
class ArithmeticDatasetBuilder(RLDatasetBuilder):
    """Additions for training and, disjoint from them, for the held-out test."""

    num_terms: int = chz.field(default=2, doc="numbers that are added; 2 to 9")
    num_digits: int = chz.field(default=3, doc="digits of each; 1 to 30")
    num_train: int = chz.field(default=4000, doc="most training problems used")
    num_test: int = chz.field(default=1000, doc="most held-out problems used; 0 for none")
    held_out: Literal["test", "development"] = chz.field(
        default="test", doc="which held-out problems; settings are chosen on development"
    )
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, answered ones first; "
        "words: as a chat if the model has one, answered as numbers are written",
    )
    seed: int = chz.field(default=0, doc="of the training problems generated and of their order")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_terms", at_least=2, at_most=9)
        check_range(self, "num_digits", at_least=1, at_most=30)
        check_range(self, "num_train", "problems_per_generation", at_least=1)
        check_range(self, "num_test", at_least=0)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate, and render the prompts."""
        train = self._builders(tokenizer, self.seed, "train", self.num_train)
        # The same for every seed: runs compare.
        test_P = self._builders(tokenizer, 0, self.held_out, self.num_test)
        dataset = ProblemDataset(train, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)

    def _builders(
        self, tokenizer: Tokenizer, seed: int, fold: Fold, most: int
    ) -> list[ProblemGroupBuilder]:
        shape = {"num_terms": self.num_terms, "num_digits": self.num_digits}
        problems = islice(generate_problems(seed, fold, **shape), most)
        return [self._group_builder(tokenizer, problem) for problem in problems]

    def _group_builder(self, tokenizer: Tokenizer, problem: Problem) -> ProblemGroupBuilder:
        text = question(problem.terms, self.prompt)
        name = f"generated problem {question(problem.terms, 'compact')}"
        tokens_T = render_prompt(tokenizer, text, chat=self.prompt == "words")
        if not tokens_T:
            raise DataError(f"{name}: the model's tokenizer makes no tokens of it")
        env = functools.partial(ArithmeticEnv, Observation(tokens_T), problem.terms, self.prompt)
        return ProblemGroupBuilder(env, name, gold_answer(problem.terms, self.prompt))
