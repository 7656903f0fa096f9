"""Questions whose answers are read from thoughts: generated sums, or rows of public sets."""

import functools
from itertools import islice
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.generated import Fold
from es_cookbook.recipes.markovian.answers import Extraction
from es_cookbook.recipes.markovian.env import Asked, MarkovianEnv, MarkovianProblem
from es_cookbook.recipes.markovian.problems import FOLDS, Problem, generate_sums
from es_cookbook.recipes.markovian.rows import read_problem
from es_cookbook.recipes.markovian.template import TEMPLATE_NAMES, Template
from es_cookbook.rl.data.problem_dataset import ProblemDataset, check_prompt
from es_cookbook.rl.data.rows import check_sources
from es_cookbook.rl.data.splits import load_splits
from es_cookbook.rl.problem_env import digest_of
from es_cookbook.rl.types import Datasets, Observation, RLDatasetBuilder, Tokenizer

_TEMPLATES = Names(TEMPLATE_NAMES, default="compact")
OPERATIONS = "+-*"


@chz.chz
class MarkovianDatasetBuilder(RLDatasetBuilder):
    """Questions for training and, disjoint from them, for the held-out test."""

    markovian: bool = chz.field(
        default=True, doc="the reader of a thought does not see the question; False: it does"
    )
    template: Template = chz.field(
        meta_factory=_TEMPLATES,
        default_factory=_TEMPLATES.build_default,
        doc="what writer and reader are asked: compact, for the bundled model, or words",
    )
    source: str | None = chz.field(
        default=None, doc=".jsonl or .parquet file, or Hub set; None generates sums"
    )
    test_source: str | None = chz.field(
        default=None, doc="the same for the test; None holds a tenth of the questions out"
    )
    fold: int = chz.field(default=0, doc="which tenth of the rows is held out: 0 to 9")
    held_out: Literal["test", "development"] = chz.field(
        default="test", doc="which generated sums are held out; settings are chosen on development"
    )
    num_terms: int = chz.field(default=4, doc="of generated sums: numbers in each")
    num_digits: int = chz.field(default=1, doc="of generated sums: most digits of a number")
    operations: str = chz.field(
        default="+", doc=f"of generated sums: signs between numbers, of {OPERATIONS}"
    )
    num_train: int = chz.field(default=4000, doc="most training problems used")
    num_test: int = chz.field(default=500, doc="most held-out problems used; 0 for none")
    problems_per_generation: int = chz.field(default=32, doc="problems in a batch")
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
    seed: int = chz.field(default=0, doc="of the sums generated and of the order")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_train", "problems_per_generation", "answer_tokens", at_least=1)
        check_range(self, "context_tokens", "continuation_tokens", at_least=1)
        check_range(self, "num_test", at_least=0)
        check_range(self, "fold", at_least=0, at_most=FOLDS - 1)
        check_range(self, "num_terms", at_least=2, at_most=100)
        check_range(self, "num_digits", at_least=1, at_most=18)
        if not self.operations or not set(self.operations) <= set(OPERATIONS):
            raise ConfigError(f"operations must be some of {OPERATIONS}, found {self.operations!r}")
        if self.test_source is not None and self.source is None:
            raise ConfigError(
                "test_source needs source=... beside it: generated sums hold out their own"
            )

    @override
    def check(self) -> None:
        check_sources(self.source, self.test_source)

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        """Generate or load, and render the prompts."""
        train, test = self.problems(tokenizer)
        if not train:
            raise DataError(f"{self.source}: there are no training problems")
        builders = [self.builder(name, problem, tokenizer) for name, problem in train.items()]
        test_P = [self.builder(name, problem, tokenizer) for name, problem in test.items()]
        dataset = _Questions(builders, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)

    def problems(self, tokenizer: Tokenizer) -> tuple[dict[str, Problem], dict[str, Problem]]:
        """Training and held-out problems by name.

        Raises:
            DataError: A source or a row that cannot be used.
        """
        most = {"num_train": self.num_train, "num_test": self.num_test}
        if self.source is not None:
            lengths = self.context_tokens, self.continuation_tokens
            read = functools.partial(
                read_problem, held_out_fold=self.fold, tokenizer=tokenizer, lengths=lengths
            )
            return load_splits(self.source, self.test_source, read, **most)
        # The test is the same for every seed: runs compare.
        return self._sums(self.seed, "train", self.num_train), self._sums(
            0, self.held_out, self.num_test
        )

    def _sums(self, seed: int, fold: Fold, most: int) -> dict[str, Problem]:
        shape = {"num_terms": self.num_terms, "num_digits": self.num_digits}
        sums = generate_sums(seed, fold, operations=self.operations, **shape)
        return {f"generated sum {each.question}": each.problem for each in islice(sums, most)}

    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> MarkovianProblem:
        """A problem as its policy meets it."""
        gold_T = self.template.answer(problem.answer, tokenizer)
        prompt_T = self.template.prompt(problem.question, tokenizer)
        reader = self.template.reader(problem.question, tokenizer, self.markovian)
        shown = (problem.answer, gold_T), (problem.question, prompt_T), ("", reader.prompt_T)
        for text, tokens_T in shown:
            if not tokens_T:
                what = repr(text) if text else "what stands before a thought (dataset.template)"
                raise DataError(f"{name}: the model's tokenizer makes no tokens of {what}")
        asked = Asked(
            Observation(prompt_T, is_last=True),
            reader,
            problem.answer,
            gold_T,
            self.answer_tokens,
            self.extraction,
            problem.thought,
        )
        make_env = functools.partial(MarkovianEnv, asked)
        return MarkovianProblem(
            make_env,
            name,
            problem_tags=problem.tags,
            contents=(digest_of(problem.source or problem.question),),
            question=problem.question,
            asked=asked,
        )


def check_room(name: str, asked: Asked, context_length: int) -> None:
    """Refuse a problem whose answer has no room where it is read, whatever the thought.

    Raises:
        DataError: Names the problem.
    """
    needed = len(asked.reader.prompt_T) + len(asked.reader.mark_T) + asked.longest
    check_prompt(name, needed, context_length)


class _Questions(ProblemDataset):
    """Questions whose answers must have room where they are read."""

    @override
    async def validate(self, context_length: int) -> None:
        await super().validate(context_length)
        for builder in (*self.builders, *self.held_out):
            assert isinstance(builder, MarkovianProblem)
            check_room(builder.name, builder.asked, context_length)
