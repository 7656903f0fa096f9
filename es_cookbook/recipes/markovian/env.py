"""Markovian training as an Env: a thought, and how likely it makes the answer where it is read.

The policy writes a thought of at most `sampling.max_tokens` tokens. Then the same policy reads it:

    reward = mean_t log π(answer_t | redacted prompt, thought, answer mark, answer before t)
             - the same of the frozen base, reading the base's own thought

as in Viteri et al., "Markovian Transformers for Informative Language Modeling" (arXiv:2404.18988),
in nats per token of the answer. Without the question in sight all that the answer needs must be in
the thought. `π` is whoever wrote the thought: a genome is paid for writing and for reading, and its
reader is its own. Under a policy gradient it is the model as it is now; the reward's own gradient,
through the reader, comes from the answer's tokens (`StepResult.reading`).

The base's part is one number for a problem, so it is added to the group, once, and no comparison
between genomes depends on it: it says how much better than the base a reward is.

The policy also answers behind its thought, greedily, which is measured as `correct` and not paid.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import chz
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.fields.parts import parts
from es_cookbook.recipes.markovian.answers import Extraction, given_answer, is_right, leaks
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, render_prompt
from es_cookbook.rl.types import (
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    Reading,
    SamplingParams,
    Tokenizer,
    Trajectory,
)

QUESTION = "{question}"


@chz.chz
class Template:
    """What the writer of a thought is asked, and what its reader sees in its place, in words.

    Both prompts are one template. The writer has the question in it and goes on with a thought. The
    reader has a redaction mark where the question was, the thought, and a mark behind which it
    answers. It is filled twice: nothing is searched for and replaced, so a question that holds the
    redaction mark, or a brace, is a question like any other.
    """

    text: str = chz.field(
        default="You will be shown a question. First write, briefly, all that is needed to answer "
        "it: the answer will be read from what you write, and the question may not be there any "
        "more.\n\nQuestion: {question}\n\nReasoning:",
        doc="what stands before the thought; {question} is the question, or the redaction mark",
    )
    redaction: str = chz.field(
        default="[redacted]", doc="stands in place of the question where the thought is read"
    )
    answer_mark: str = chz.field(default="\nAnswer: ", doc="stands between thought and answer")
    chat: bool = chz.field(
        default=True, doc="put the text into the tokenizer's chat template, if it has one"
    )

    @chz.validate
    def _marks(self) -> None:
        if self.text.count(QUESTION) != 1:
            raise ConfigError(
                f"template.text must have {QUESTION} once, found {self.text.count(QUESTION)} times"
            )
        for name in ("redaction", "answer_mark"):
            if not getattr(self, name):
                raise ConfigError(f"template.{name} must be some text, found none")

    def prompt(self, question: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens before a thought."""
        before, _, after = self.text.partition(QUESTION)
        return render_prompt(tokenizer, f"{before}{question}{after}", chat=self.chat)

    def reader(self, question: str, tokenizer: Tokenizer, markovian: bool) -> "Reader":
        """How thoughts about a question are read; Markovian: without it."""
        shown = self.redaction if markovian else question
        return Reader(tokenizer, self.prompt(shown, tokenizer), self._mark)

    def answer(self, answer: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens of an answer; spaces at the end of the mark are its own, as in any text."""
        return tokens_of(tokenizer, self.answer_mark[len(self._mark) :] + answer)

    @property
    def _mark(self) -> str:
        return self.answer_mark.rstrip(" ")


parts(Template, f"{__name__}:Compact")


@chz.chz
class Compact(Template):
    """For the bundled model of single characters: `3+5+9+2:=8,17,19>19`."""

    text: str = chz.field(default="{question}:", doc="what stands before the thought")
    redaction: str = chz.field(default="?", doc="stands in place of the question")
    answer_mark: str = chz.field(default=">", doc="stands between thought and answer")
    chat: bool = chz.field(default=False, doc="put the text into the tokenizer's chat template")


TEMPLATE_NAMES = {
    name: f"{__name__}:{of}" for name, of in (("words", "Template"), ("compact", "Compact"))
}
"""What a user types on the command line."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """How the thoughts about one question are read.

    A thought is read as the text that people see in logs, not as the tokens that were sampled: how
    a text is cut into tokens could tell the reader what no one can read. Texts of special tokens in
    it are text.

    Attributes:
        tokenizer: the model's own.
        prompt_T: the tokens before the thought.
        answer_mark: stands between thought and answer.
    """

    tokenizer: Tokenizer
    prompt_T: tuple[int, ...]
    answer_mark: str

    def __call__(self, thought: str, most_tokens: int) -> tuple[int, ...]:
        """What stands before the answer; of the thought, so much from its start as fits."""
        room = max(most_tokens - len(self.prompt_T) - len(self.mark_T), 0)
        return self.prompt_T + tokens_of(self.tokenizer, thought)[:room] + self.mark_T

    @functools.cached_property
    def mark_T(self) -> tuple[int, ...]:
        """The tokens of the answer mark."""
        return tokens_of(self.tokenizer, self.answer_mark)


def tokens_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A text inside of another, in which names of special tokens are text like any other."""
    return tuple(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


@dataclasses.dataclass(frozen=True)
class Asked:
    """One problem, as its writer and its reader see it.

    Attributes:
        observation: the prompt of the writer.
        reader: how its thoughts are read.
        gold: the answer.
        gold_T: its tokens, at least one.
        answer_tokens: most tokens of an answer.
        extraction: where an answer stands.
        thought: a hand-written one, where one is known.
    """

    observation: Observation
    reader: Reader
    gold: str
    gold_T: tuple[int, ...]
    answer_tokens: int
    extraction: Extraction
    thought: str | None = None

    @property
    def longest(self) -> int:
        """Tokens that are kept free for an answer."""
        return max(len(self.gold_T), self.answer_tokens)

    def read_T(self, thought: str, policy: Policy) -> tuple[int, ...]:
        """What stands before the answer; the end of a thought is cut that does not fit."""
        return self.reader(thought, policy.context_length - self.longest)

    async def read(self, thought: str, policy: Policy) -> Reading:
        """The answer behind a thought, as the policy reads it."""
        prompt_T = self.read_T(thought, policy)
        logprobs_T = await policy.logprobs(prompt_T, self.gold_T)
        return Reading(prompt_T, self.gold_T, tuple(logprobs_T))

    async def logprob(self, thought: str, policy: Policy) -> float:
        """Mean log-probability of the answer's tokens behind a thought, in nats."""
        return mean_logprob(await self.read(thought, policy))

    async def answer(self, thought: str, policy: Policy) -> str:
        """What the policy answers behind a thought, greedily."""
        observation = Observation(self.read_T(thought, policy), is_last=True)
        params = SamplingParams(max_tokens=self.answer_tokens)
        return (await policy.sample(observation, params)).text

    def is_right(self, text: str) -> bool:
        """Whether an answer's text has the right one."""
        return is_right(given_answer(text, self.gold, self.extraction), self.gold)


def mean_logprob(reading: Reading) -> float:
    """Of the tokens that were read."""
    return math.fsum(reading.logprobs_T) / len(reading.logprobs_T)


class MarkovianEnv(ProblemEnv):
    """One thought about one question."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked.observation)
        self.asked = asked

    @override
    def grade(self, text: str) -> Grade:
        raise EnvError("a thought is read by its policy, so `graded` is what to await")

    @override
    async def graded(self, text: str) -> Grade:
        """Reward and metrics: `correct`, `logprob`, `leaks`."""
        reading = await self.asked.read(text, self.policy)
        logprob = mean_logprob(reading)
        answer = await self.asked.answer(text, self.policy)
        metrics = {
            "correct": float(self.asked.is_right(answer)),
            "logprob": logprob,
            "leaks": float(leaks(text, self.asked.gold)),
        }
        return Grade(logprob, metrics, {"answer": answer}, reading)


@dataclasses.dataclass(frozen=True, slots=True)
class MarkovianProblem(ProblemGroupBuilder):
    """One question, and the base's own thought about it."""

    question: str = dataclasses.field(kw_only=True)
    asked: Asked = dataclasses.field(kw_only=True)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        base = policies[0].base
        thought = (await base.sample(self.asked.observation)).text
        logprob = await self.asked.logprob(thought, base)
        return [GroupReward(-logprob, {"base_logprob": logprob}) for _ in trajectories]
