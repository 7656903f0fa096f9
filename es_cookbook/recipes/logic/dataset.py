"""Problems of a reasoning-gym generator as a dataset.

A generator's problems follow from a seed, and the held-out ones have a separate seed. No
question is both trained on and held out, and none is in a split twice.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError, WorkerError, WorkerTimeoutError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, say
from es_cookbook.common.trust import is_plain_option, needs_trust
from es_cookbook.recipes.logic.generators import (
    Problem,
    Source,
    check_source,
    parsed_options,
    problems,
    score,
    score_in_limits,
    scorer,
)
from es_cookbook.rl.data.generated import FoldedDatasetBuilder
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.prompts import render_observation
from es_cookbook.rl.rewards.answers import extracted, last_number
from es_cookbook.rl.types import ANSWER, Observation, RLDataset, Tokenizer

PromptStyle: TypeAlias = Literal["compact", "chat", "words"]
RewardKind: TypeAlias = Literal["score", "correct"]

COMPACT_AFTER = {"chain_sum": "problem: "}
"""Generator -> where the part of its questions begins that a compact prompt asks."""

_WORDS = (
    "\n\nShow your work in <think> </think> tags. And return only the final answer, in the form "
    "asked for, in <answer> </answer> tags."
)
_NUMBER = re.compile(r"-?[0-9]+")


def question(problem: Problem, style: PromptStyle) -> str:
    """Return the problem, with a sentence on tags ("words") or its last part ("compact")."""
    if style == "compact":
        return problem.question.rpartition(COMPACT_AFTER.get(problem.source.task, "\0"))[2]
    return problem.question + (_WORDS if style == "words" else "")


@dataclasses.dataclass(eq=False)
class LogicEnv(ProblemEnv):
    """One attempt at one problem."""

    observation: Observation
    problem: Problem
    style: PromptStyle
    reward: RewardKind
    timeout: float

    @override
    async def graded(self, text: str) -> Grade:
        """Return reward and metrics: `correct`, `score`, `well_formed`, `not_scored`, `late`."""
        own, entry = scorer(self.problem.source), self.problem.entry
        answer = said = extracted(text, "answer" if self.style == "words" else "text") or ""
        asks_for_number = _NUMBER.fullmatch(self.problem.gold or "") is not None
        if asks_for_number and self.style == "chat":
            answer = "" if (number := last_number(said)) is None else str(number)
        found, late = None, False
        try:
            if own.is_cheap or not answer:
                found = score(own, answer, entry)
            else:
                found = await in_worker(score_in_limits, own, answer, entry, timeout=self.timeout)
        except WorkerError as error:
            late = isinstance(error, WorkerTimeoutError)
        value = found or 0.0
        correct = float(math.isclose(value, 1.0))
        metrics = {
            "correct": correct,
            "score": value,
            "well_formed": float(bool(_NUMBER.fullmatch(said) if asks_for_number else said)),
            "not_scored": float(found is None),
            "late": float(late),
        }
        reward = value if self.reward == "score" else correct
        return Grade(reward, metrics, {ANSWER: answer} if answer else None)


SMALL_TASK = "chain_sum"
SMALL_OPTIONS = ("min_terms=3", "max_terms=3", "min_digits=1", "max_digits=1")
"""The bundled model's half-known task: sums and differences of three digits."""


def _options(problems: "LogicDatasetBuilder") -> str | None:
    """Return the trust that a generator's options need: some name files."""
    options = parsed_options(problems.task, problems.options or ())
    return None if all(is_plain_option(value) for _, value in options) else "options:reasoning_gym"


@chz.chz
class LogicDatasetBuilder(FoldedDatasetBuilder):
    """Problems of a reasoning-gym generator for training and, disjoint from them, for the test."""

    last_fold: ClassVar[int | None] = None
    task: str = chz.field(default=SMALL_TASK, doc="name of a reasoning-gym generator")
    options: tuple[str, ...] | None = chz.field(
        default=None,
        doc="the generator's own options, name=value,name=value; None: its defaults, and for "
        "chain_sum sums of three digits, which the bundled model half knows",
        metadata=needs_trust(_options, "are options of a package, and can name files"),
    )
    num_train: int = chz.field(default=2000, doc="number of training problems")
    num_test: int = chz.field(default=500, doc="number of held-out problems")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, the answer is the whole text; chat: the question as a "
        "chat if the model has one, and where a whole number is asked for the last number counts; "
        "words: as chat, the answer is in <answer> tags",
    )
    reward: RewardKind = chz.field(
        default="correct",
        doc="correct: 1 if the generator gives full marks; score: what it gives, parts too",
    )
    timeout: float = chz.field(
        default=5.0, doc="seconds for scoring an answer; then it scores 0 (metric `late`)"
    )

    _timeout = in_range("timeout", above=0)

    @override
    def check(self) -> None:
        check_source(self.generator())

    @override
    def splits(
        self, tokenizer: Tokenizer
    ) -> tuple[list[ProblemGroupBuilder], list[ProblemGroupBuilder]]:
        self.check()
        say(f"making {self.num_train + self.num_test:,} problems of {self.task}")
        build = functools.partial(self._group_builder, tokenizer)
        train, test = self.problems()
        return list(map(build, train)), list(map(build, test))

    @override
    def dataset(
        self, train: Sequence[ProblemGroupBuilder], test_P: Sequence[ProblemGroupBuilder]
    ) -> RLDataset:
        seed = derive_seed(self.seed, "logic/level", 0)
        return ProblemDataset(train, self.problems_per_generation, seed, test_P)

    def generator(self) -> Source:
        """Return the generator with its options."""
        options = self.options
        if options is None:
            options = SMALL_OPTIONS if self.task == SMALL_TASK else ()
        return Source(self.task, parsed_options(self.task, options))

    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """Return training and test problems.

        A fold is what comes after those before it, and they are not trained on either.

        Raises:
            DataError: There are not so many different ones.
        """
        taken: set[str] = set()
        test: list[Problem] = []
        for _ in range(self.fold + 1):
            test = self._drawn(derive_seed(0, "logic/test"), self.num_test, taken)
        train = self._drawn(derive_seed(self.seed, "logic/train"), self.num_train, taken)
        return train, test

    def _drawn(self, seed: int, count: int, taken: set[str]) -> list[Problem]:
        """Draw `count` problems whose questions are not taken yet."""
        untaken = (p for p in problems(self.generator(), seed) if p.question not in taken)
        drawn = list(itertools.islice(untaken, count))
        taken.update(problem.question for problem in drawn)
        if len(drawn) < count:
            raise DataError(
                f"{self.task} has only {len(taken):,} different problems with these options: "
                f"fewer than num_train={self.num_train} and num_test={self.num_test} (in "
                f"{plural(self.fold + 1, 'fold')}) together"
            )
        return drawn

    def _group_builder(self, tokenizer: Tokenizer, problem: Problem) -> ProblemGroupBuilder:
        style = self.prompt
        text = question(problem, style)
        observation = render_observation(tokenizer, text, chat=style != "compact")
        source, gold = problem.source, problem.gold
        return ProblemGroupBuilder(
            functools.partial(LogicEnv, observation, problem, style, self.reward, self.timeout),
            f"{source.task}, problem {problem.question[-60:]!r}",
            gold if style != "words" or gold is None else f"<answer>{gold}</answer>",
            contents=(digest_of(f"{source.task} {problem.question}"),),
        )
