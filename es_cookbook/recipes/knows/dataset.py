"""Questions that are asked twice: for the answer, and for whether the model can give it.

    direct    What is the capital of Kenya?
    meta      Would you answer "What is the capital of Kenya?" correctly? Yes or no?

Both prompts begin a chat, so the model has not seen its answer when it reads the second. That is
the joint task of ESMA (Park, Meyerson, Qiu and Miikkulainen 2026, arXiv:2602.02605), with a reward
of our own. The second reply is not sampled; a rollout earns, in bits,

    1 + log2 P("Yes")    if the answer is right
    1 + log2 P("No")     if it is wrong

This is 0 for a probability of 1/2 and at most 1. The objective `balanced` counts right and wrong
answers alike, so that claims which do not depend on the question earn at most 0, and "yes" to
everything earns as little as "no" to everything.

The questions are facts (those of the recipe `chat`) and sums of numbers of one to three digits, of
which a small model gets some right.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from typing import ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.chat.problems import Problem, generate_problems
from es_cookbook.recipes.conciseness.reward import stands_in
from es_cookbook.rl.data.generated import FOLDS, Fold, GeneratedDatasetBuilder, distinct
from es_cookbook.rl.messages.encoder import inside
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.prompts import render_observation, render_prompt
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.rewards.values import folded
from es_cookbook.rl.types import ANSWER, Observation, Tokenizer

META = 'Would you answer "{}" correctly? Yes or no?'
WORDS = ("Yes", "No")


def is_right(text: str, gold: str) -> bool:
    """Return whether an answer's last number is the gold one, or contains the gold words.

    >>> is_right("3 + 4 = 7.", "7"), is_right("It is LIMA.", "Lima"), is_right("Limassol", "Lima")
    (True, True, False)
    """
    if gold.isdigit():
        return last_number(text) == int(gold)
    return stands_in(folded(gold), folded(text))


def grade_claim(right: bool, yes: float, no: float) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics of an answer and a claim.

    >>> grade_claim(True, math.log(0.5), math.log(0.25))[0]
    0.0

    Args:
        right: whether the answer is right.
        yes: log-probability of "Yes" as the second reply.
        no: that of "No".
    """
    claims = yes > no
    metrics = {
        "correct": right,
        "yes": claims,
        "agrees": claims == right,
        "well_formed": math.exp(yes) + math.exp(no) >= 0.5,
        "yes_if_right" if right else "yes_if_wrong": claims,
    }
    bits = 1 + (yes if right else no) / math.log(2)
    return bits, {name: float(value) for name, value in metrics.items()}


@dataclasses.dataclass(eq=False)
class KnowsEnv(ProblemEnv):
    """An answer, and in another chat the probability of claiming that it is right.

    Attributes:
        observation: the question.
        meta_T: the second prompt.
        words_T: "Yes" and "No".
        gold: the right answer.
    """

    observation: Observation
    meta_T: tuple[int, ...]
    words_T: tuple[tuple[int, ...], ...]
    gold: str

    @override
    async def graded(self, text: str) -> Grade:
        answer = spoken(text)
        yes, no = [
            math.fsum(await self.policy.logprobs(self.meta_T, word_T)) for word_T in self.words_T
        ]
        reward, metrics = grade_claim(is_right(answer, self.gold), yes, no)
        return Grade(reward, metrics, {ANSWER: answer})


@chz.chz
class KnowsDatasetBuilder(GeneratedDatasetBuilder):
    """Facts and sums, for training and, disjoint from them, for the held-out test."""

    last_fold: ClassVar[int | None] = FOLDS - 1
    problems_per_generation: int = chz.field(default=16, doc="problems in a batch")
    num_train: int = chz.field(default=600, doc="most training problems used")
    num_test: int = chz.field(default=120, doc="most held-out problems used; 0 for none")
    meta: str = chz.field(default=META, doc="the second prompt; {} is the question")

    @chz.validate
    def _meta(self) -> None:
        if "{}" not in self.meta:
            raise ConfigError(f"meta must have {{}} in place of the question, found {self.meta!r}")

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        words_T = tuple(inside(tokenizer, word) for word in WORDS)
        if not all(words_T):
            raise DataError(f"the model's tokenizer has no tokens for {' and '.join(WORDS)}")
        for kind, problem in self._problems(seed, fold):
            asked = render_observation(tokenizer, problem.question, chat=True)
            meta = self.meta.replace("{}", problem.question)
            meta_T = render_prompt(tokenizer, meta, chat=True)
            env = functools.partial(KnowsEnv, asked, meta_T, words_T, problem.gold)
            yield ProblemGroupBuilder(env, problem.question, problem_tags=(kind,))

    def _problems(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        """Yield facts and sums in turn; when the facts end, the sums go on."""
        rng = random.Random(derive_seed(seed, f"knows/{fold}"))
        sums = distinct(functools.partial(_sum, rng), lambda p: p.is_in(fold, self.fold))
        facts = generate_problems("conciseness", seed, fold, self.fold)
        for problem in sums:
            if fact := next(facts, None):
                yield "facts", fact
            yield "sums", problem


def _sum(rng: random.Random) -> Problem:
    """Return a random sum of two numbers of one to three digits."""
    a, b = (rng.randint(1, 10 ** rng.randint(1, 3) - 1) for _ in range(2))
    return Problem(f"What is {a} + {b}? Answer briefly.", str(a + b))
