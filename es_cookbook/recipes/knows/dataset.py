"""Questions that are asked twice: for the answer, and for whether the model can give it.

    direct    What is the capital of Kenya?
    meta      Would you answer "What is the capital of Kenya?" correctly? Yes or no?

Both prompts begin a chat: whoever says "yes" has not seen the answer. That is the joint task of
ESMA (Park, Meyerson, Qiu and Miikkulainen 2026, arXiv:2602.02605), with a reward of our own:

    1           the answer is right, and "yes"
    `admitted`  the answer is wrong, and "no"
    0           anything else

`admitted` is below 1, because a model that answers wrongly on purpose and always says "no" agrees
with itself every time.

The questions are facts (those of the recipe `chat`) and sums of numbers of one to three digits, of
which a small model gets some right.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Iterator
from typing import ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.chat.problems import Problem, generate_problems
from es_cookbook.rl.data.generated import FOLDS, Fold, GeneratedDatasetBuilder, distinct
from es_cookbook.rl.messages.thoughts import spoken, whole_turn
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.prompts import render_observation
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.rewards.values import folded
from es_cookbook.rl.types import ANSWER, Action, Observation, ProvableEnv, StepResult, Tokenizer

META = 'Would you answer "{}" correctly? Yes or no?'


def is_right(text: str, gold: str) -> bool:
    """Whether an answer's last number is the gold one, or the gold words stand in it.

    >>> is_right("3 + 4 = 7.", "7"), is_right("It is LIMA.", "Lima"), is_right("Limassol", "Lima")
    (True, True, False)
    """
    if gold.isdigit():
        return last_number(text) == int(gold)
    return re.search(rf"(?<!\w){re.escape(folded(gold))}(?!\w)", folded(text)) is not None


def said(text: str) -> str | None:
    """The "yes" or "no" with which a text begins, if it does.

    >>> said(" Yes, I can."), said("**No**"), said("Nobody knows.")
    ('yes', 'no', None)
    """
    found = re.match(r"\W*(yes|no)\b", folded(text))
    return found[1] if found else None


class KnowsEnv(ProvableEnv):
    """An answer, and in another chat whether the model can give it."""

    def __init__(self, direct: Observation, meta: Observation, gold: str, admitted: float) -> None:
        self._next, self._meta = direct, meta
        self._gold, self._admitted = gold, admitted
        self._answer: str | None = None

    @override
    async def initial_observation(self) -> Observation:
        return self._next

    @override
    async def step(self, action: Action) -> StepResult:
        text = spoken(whole_turn(action.text, self._next.opened))
        if self._answer is None:
            self._answer, self._next = text, self._meta
            return StepResult(0.0, done=False, next_observation=self._meta)
        return self._graded(self._answer, text)

    def _graded(self, answer: str, reply: str) -> StepResult:
        right, claim = is_right(answer, self._gold), said(reply)
        yes, agrees = claim == "yes", claim == ("yes" if right else "no")
        metrics = {"correct": right, "yes": yes, "agrees": agrees, "well_formed": claim is not None}
        metrics["yes_if_right" if right else "yes_if_wrong"] = yes
        reward = agrees * (1.0 if right else self._admitted)
        told = {name: float(value) for name, value in metrics.items()}
        return StepResult(reward, done=True, metrics=told, logs={ANSWER: answer})

    @override
    async def try_gold(self, gold: str | tuple[str, ...], context_length: int) -> tuple[float, str]:
        answer, reply = gold
        return self._graded(answer, reply).reward, ""


@chz.chz
class KnowsDatasetBuilder(GeneratedDatasetBuilder):
    """Facts and sums, for training and, disjoint from them, for the held-out test."""

    last_fold: ClassVar[int | None] = FOLDS - 1
    problems_per_generation: int = chz.field(default=8, doc="problems in a batch")
    num_train: int = chz.field(default=600, doc="most training problems used")
    num_test: int = chz.field(default=120, doc="most held-out problems used; 0 for none")
    meta: str = chz.field(default=META, doc="the second prompt; {} is the question")
    admitted: float = chz.field(
        default=0.3, doc="reward of a wrong answer that the model said it cannot give"
    )
    answer_tokens: int = chz.field(default=16, doc="most tokens of an answer")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "admitted", at_least=0, at_most=1)
        check_range(self, "answer_tokens", at_least=1)
        if "{}" not in self.meta:
            raise ConfigError(f"meta must have {{}} in place of the question, found {self.meta!r}")

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        for kind, problem in self._problems(seed, fold):
            direct, meta = (
                dataclasses.replace(
                    render_observation(tokenizer, text, chat=True), max_tokens=most, is_last=True
                )
                for text, most in (
                    (problem.question, self.answer_tokens),
                    (self.meta.replace("{}", problem.question), 4),
                )
            )
            env = functools.partial(KnowsEnv, direct, meta, problem.gold, self.admitted)
            yield ProblemGroupBuilder(env, problem.question, (problem.gold, "Yes"), (kind,))

    def _problems(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        """Facts and sums in turn; when the facts end, the sums go on."""
        rng = random.Random(derive_seed(seed, f"knows/{fold}"))
        sums = distinct(functools.partial(_sum, rng), lambda p: p.is_in(fold, self.fold))
        facts = generate_problems("conciseness", seed, fold, self.fold)
        for problem in sums:
            if fact := next(facts, None):
                yield "facts", fact
            yield "sums", problem


def _sum(rng: random.Random) -> Problem:
    """A sum of two numbers of one to three digits each, of any fold."""
    a, b = (rng.randint(1, 10 ** rng.randint(1, 3) - 1) for _ in range(2))
    return Problem(f"What is {a} + {b}? Answer briefly.", str(a + b))
