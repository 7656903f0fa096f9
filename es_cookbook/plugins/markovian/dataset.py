"""Questions whose answers are read from thoughts: generated sums, or rows of public sets."""

import functools
from collections.abc import Iterator

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.names import Names
from es_cookbook.plugins.markovian.env import (
    TEMPLATE_NAMES,
    Extraction,
    MarkovianEnv,
    MarkovianProblem,
    Template,
    TokenizedProblem,
)
from es_cookbook.plugins.markovian.problems import Problem, generate_sums, read_problem
from es_cookbook.rl.data.generated import Fold, SourcedDatasetBuilder
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import digest_of
from es_cookbook.rl.types import Observation, Tokenizer

OPERATIONS = "+-*"


@chz.chz
class MarkovianDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Questions for training and, disjoint from them, for the held-out test."""

    markovian: bool = chz.field(default=True, doc="hide the question from the reader of a thought")
    template: Template = Names(TEMPLATE_NAMES, default="compact").field(
        "prompts of writer and reader: compact, for the bundled model, or words"
    )
    num_terms: int = chz.field(default=4, doc="generated sums: numbers in each")
    num_digits: int = chz.field(default=1, doc="generated sums: most digits of a number")
    operations: str = chz.field(default="+", doc=f"generated sums: signs, of {OPERATIONS}")
    answer_tokens: int = chz.field(default=4, doc="maximum tokens of the answer that is measured")
    extraction: Extraction = chz.field(default="auto", doc="where to find that answer in its text")
    context_tokens: int = chz.field(default=200, doc="plain texts: tokens of the question")
    continuation_tokens: int = chz.field(default=100, doc="plain texts: tokens of the answer")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "answer_tokens", "context_tokens", "continuation_tokens", at_least=1)
        check_range(self, "num_terms", at_least=2, at_most=100)
        check_range(self, "num_digits", at_least=1, at_most=18)
        check_range(self, "fold", at_least=0, at_most=1 if self.source is None else self.last_fold)
        if not self.operations or not set(self.operations) <= set(OPERATIONS):
            raise ConfigError(f"operations must be some of {OPERATIONS}, found {self.operations!r}")

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        shape = {"num_terms": self.num_terms, "num_digits": self.num_digits}
        sums = generate_sums(seed, fold, operations=self.operations, **shape)
        return ((f"generated sum {each.question}", each.problem) for each in sums)

    @override
    def read(self, row: Row, tokenizer: "Tokenizer | None") -> Problem:
        return read_problem(row, tokenizer, (self.context_tokens, self.continuation_tokens))

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> MarkovianProblem:
        mark_T, gold_T = self.template.answer(problem.answer, tokenizer)
        prompt_T = self.template.prompt(problem.question, tokenizer)
        shown = self.template.redaction if self.markovian else problem.question
        before_T = self.template.prompt(shown, tokenizer)
        given = (problem.answer, gold_T), (problem.question, prompt_T), ("", before_T)
        for text, tokens_T in given:
            if not tokens_T:
                what = repr(text) if text else "the text before a thought (dataset.template)"
                raise DataError(f"{name}: the model's tokenizer makes no tokens of {what}")
        tokenized = TokenizedProblem(
            tokenizer,
            Observation(prompt_T, is_last=True),
            before_T,
            mark_T,
            problem.answer,
            gold_T,
            self.answer_tokens,
            self.extraction,
            problem.thought,
        )
        return MarkovianProblem(
            functools.partial(MarkovianEnv, tokenized),
            name,
            problem_tags=problem.tags,
            contents=(digest_of(problem.source or problem.question),),
            question=problem.question,
            tokenized=tokenized,
        )
