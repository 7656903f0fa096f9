"""Questions whose answers are read from thoughts: generated sums, or rows of public sets."""

import functools
from collections.abc import Iterator, Sequence
from typing import cast

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.names import Names
from es_cookbook.common.schedules import Table
from es_cookbook.plugins.markovian.env import (
    TEMPLATE_NAMES,
    Asked,
    Extraction,
    MarkovianEnv,
    MarkovianProblem,
    Template,
)
from es_cookbook.plugins.markovian.problems import Problem, generate_sums, read_problem
from es_cookbook.rl.data.generated import Fold, SourcedDatasetBuilder
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import ProblemGroupBuilder, digest_of
from es_cookbook.rl.types import Observation, RLDataset, Tokenizer

OPERATIONS = "+-*"


@chz.chz
class HandWritten:
    """Hand-written thoughts of the data stand in for the model's own, in a share of each batch.

    So a reader learns from good thoughts before there are any, as with a schedule that falls.

    >>> fades = Table(generations=(0, 20), factors=(1.0, 0.0))
    >>> [HandWritten(schedule=fades).count(generation, 32) for generation in (0, 5, 20, 99)]
    [32, 24, 0, 0]
    """

    share: float = chz.field(default=1.0, doc="of a batch's problems")
    schedule: Table = chz.field(default=Table(), doc="factor on share by generation")

    @chz.validate
    def _share(self) -> None:
        check_range(self, "share", at_least=0, at_most=1)

    def count(self, generation: int, num_problems: int) -> int:
        """Of a batch of so many problems; of held-out ones none."""
        return round(min(self.share * self.schedule(generation, 0), 1.0) * num_problems)


class GivenThoughts(RLDataset):
    """Problems of which some, in each batch the first, are tried with their hand-written thoughts.

    It is no `ProblemDataset`: a mixture would take the problems of one and leave the thoughts out.

    Raises:
        DataError: A problem has none.
    """

    def __init__(self, problems: ProblemDataset[MarkovianProblem], thoughts: HandWritten) -> None:
        self._problems, self._thoughts = problems, thoughts
        for problem in problems.builders:
            if problem.asked.thought is None:
                raise DataError(
                    f"{problem.name}: it has no hand-written thought, which dataset.thoughts=data "
                    "needs: a field 'thought', for example by es-cookbook generate "
                    "completion_field=thought"
                )

    @override
    def get_batch(self, generation: int) -> Sequence[ProblemGroupBuilder]:
        batch_P = self._problems.get_batch(generation)
        count = self._thoughts.count(generation, len(batch_P))
        return [*(problem.given for problem in batch_P[:count]), *batch_P[count:]]

    @override
    def __len__(self) -> int:
        return len(self._problems)

    @property
    @override
    def training_problems(self) -> Sequence[ProblemGroupBuilder]:
        return self._problems.training_problems

    @override
    async def validate(self, context_length: int) -> None:
        await self._problems.validate(context_length)


@chz.chz
class MarkovianDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Questions for training and, disjoint from them, for the held-out test."""

    markovian: bool = chz.field(
        default=True, doc="the reader of a thought does not see the question; False: it does"
    )
    template: Template = Names(TEMPLATE_NAMES, default="compact").field(
        "what writer and reader are asked: compact, for the bundled model, or words"
    )
    thoughts: HandWritten | None = Names({"data": f"{__name__}:HandWritten"}, default="data").field(
        "data: hand-written thoughts of the data in place of the model's own, in a share of the "
        "training problems; None: its own",
        optional=True,
    )
    num_terms: int = chz.field(default=4, doc="of generated sums: numbers in each")
    num_digits: int = chz.field(default=1, doc="of generated sums: most digits of a number")
    operations: str = chz.field(
        default="+", doc=f"of generated sums: signs between numbers, of {OPERATIONS}"
    )
    answer_tokens: int = chz.field(
        default=4, doc="most tokens of the answer that is sampled to measure what is right"
    )
    extraction: Extraction = chz.field(
        default="auto", doc="where that answer stands: tag, anchor, integer, or auto"
    )
    context_tokens: int = chz.field(
        default=200, doc="of rows with a text alone: tokens from its start that are the question"
    )
    continuation_tokens: int = chz.field(
        default=100, doc="of rows with a text alone: tokens after these that are the answer"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "answer_tokens", "context_tokens", "continuation_tokens", at_least=1)
        check_range(self, "num_terms", at_least=2, at_most=100)
        check_range(self, "num_digits", at_least=1, at_most=18)
        if not self.operations or not set(self.operations) <= set(OPERATIONS):
            raise ConfigError(f"operations must be some of {OPERATIONS}, found {self.operations!r}")

    @override
    def dataset(
        self, train: Sequence[ProblemGroupBuilder], test_P: Sequence[ProblemGroupBuilder]
    ) -> RLDataset:
        if self.thoughts is None:
            return super().dataset(train, test_P)
        own_P = cast("Sequence[MarkovianProblem]", train)
        held_out_P = cast("Sequence[MarkovianProblem]", test_P)
        given = own_P, self.problems_per_generation, self.seed, held_out_P
        return GivenThoughts(ProblemDataset(*given), self.thoughts)

    @property
    @override
    def last_fold(self) -> int | None:
        return 1 if self.source is None else super().last_fold

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
                what = repr(text) if text else "what stands before a thought (dataset.template)"
                raise DataError(f"{name}: the model's tokenizer makes no tokens of {what}")
        asked = Asked(
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
            functools.partial(MarkovianEnv, asked),
            name,
            problem_tags=problem.tags,
            contents=(digest_of(problem.source or problem.question),),
            question=problem.question,
            asked=asked,
        )
