"""A chat model's tasks as data sets, each with a test that no setting was chosen on."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.recipes.chat.problems import KINDS, Problem, Task, generate_problems, grade
from es_cookbook.rl.data.generated import FOLDS, Fold, GeneratedDatasetBuilder
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.prompts import render_observation
from es_cookbook.rl.types import Observation, Tokenizer


@dataclasses.dataclass(eq=False)
class _ChatEnv(ProblemEnv):
    """One answer to one question."""

    observation: Observation
    task: Task
    problem: Problem

    def __post_init__(self) -> None:
        self.full_reward = KINDS[self.task].full_reward

    @override
    def grade(self, text: str) -> Grade:
        return grade(self.task, spoken(text), self.problem)


@chz.chz
class ChatDatasetBuilder(GeneratedDatasetBuilder):
    """Questions for a chat model, for training and, disjoint from them, for the held-out test."""

    last_fold: ClassVar[int | None] = FOLDS - 1
    task: Task = chz.field(
        default="sums",
        doc="sums or differences of two numbers; both, as the generator chain_sum of reasoning-gym "
        "asks them; constraints on a text, which a program checks; conciseness; extraction of "
        "fields into JSON",
    )
    problems_per_generation: int = chz.field(default=8, doc="problems in a batch")
    answer_tokens: int | None = chz.field(
        default=None, doc="most tokens of an answer; as many as the task needs if unset"
    )
    num_train: int = chz.field(default=1000, doc="most training problems used")
    num_test: int = chz.field(default=100, doc="most held-out problems used; 0 for none")

    _answers = in_range("answer_tokens", at_least=1)

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        longest = self.answer_tokens or KINDS[self.task].max_tokens
        for problem in generate_problems(self.task, seed, fold, self.fold):
            asked = render_observation(tokenizer, problem.question, chat=True)
            asked = dataclasses.replace(asked, max_tokens=longest)
            env = functools.partial(_ChatEnv, asked, self.task, problem)
            tags = ("_".join(dict(problem.wanted)),) if self.task == "extraction" else ()
            yield ProblemGroupBuilder(env, problem.question, problem.gold, problem_tags=tags)
