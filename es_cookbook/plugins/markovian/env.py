"""Markovian training as an Env: a thought, and how likely it makes the answer where it is read.

The policy writes a thought of at most `sampling.max_tokens` tokens. Then the same policy reads it:

    reward = mean_t log π(answer_t | redacted prompt, thought, answer mark, answer before t)
             - the same of the frozen base, reading the base's own thought

as in Viteri et al., "Markovian Transformers for Informative Language Modeling" (arXiv:2404.18988),
in nats per token of the answer. If the reader does not see the question, the thought must contain
all that the answer needs. `π` is the policy that wrote the thought: a genome is rewarded for its
thoughts and for reading them. Under a policy gradient it is the current model; the
reward's own gradient, through the reader, comes from the answer's tokens (`StepResult.reading`).

The base's part is one number per problem, so it is a reward of the group and no comparison between
genomes depends on it. It shows how much better than the base a reward is.

The policy also answers after its thought, greedily: the metric `correct`, which is not rewarded.
The answer in a text (`given_answer`):

    tag       the last <answer>…</answer>
    anchor    the text after the last "Answer:", or else after the last "="
    integer   the first whole number
    auto      the first of these that the text has (integer only if the gold answer is a number), or
              else its first line
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook import Grade, Observation, ProblemEnv, SamplingParams
from es_cookbook.common.checks import check_types
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.registry import Registered
from es_cookbook.rl.messages.encoder import as_text
from es_cookbook.rl.problem_env import ProblemGroupBuilder, check_prompt
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.rewards.format import extract_answer
from es_cookbook.rl.rewards.values import composed
from es_cookbook.rl.types import GroupReward, LostRollout, Policy, Reading, Tokenizer, Trajectory

Extraction: TypeAlias = Literal["auto", "tag", "anchor", "integer"]

LONGEST = 10_000
"""Characters at the start of a text that are searched for an answer."""
_ANCHORS = ("answer:", "=")
_INTEGER = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?!\d)|(?<!\d)-?\d+", re.ASCII)
_LETTER = re.compile(r"(?<!\w)\(?([A-Z])\)?(?!\w)")
_NUMBER = re.compile(r"[-+]?\d{1,40}(?:\.\d{1,40})?", re.ASCII)


def given_answer(text: str, gold: str, extraction: Extraction = "auto") -> str | None:
    """Return the answer in a text; None if it has none of this kind.

    >>> given_answer("so <answer> 7 </answer>", "7", "tag"), given_answer("3+4 = 7", "7", "anchor")
    ('7', '7')
    >>> given_answer("It is 7 of 9.", "7", "integer"), given_answer("It is 7.", "7", "tag")
    ('7', None)
    """
    text = text[:LONGEST]
    readers = {"tag": extract_answer, "anchor": _anchored, "integer": _integer}
    if extraction != "auto":
        return readers[extraction](text)
    for kind, read in readers.items():
        given = read(text)
        if given is not None and (kind != "integer" or _value(gold) is not None):
            return given
    return _first_line(text)


def is_right(given: str | None, gold: str) -> bool:
    """Return whether an answer is right: an equal number, the same letter or text.

    >>> is_right("19.0", "19"), is_right("(C) because", "C"), is_right("19 apples", "19")
    (True, True, False)
    """
    if given is None:
        return False
    given, gold = composed(given.strip().rstrip(".").strip()), composed(gold.strip())
    if len(gold) == 1 and "A" <= gold <= "Z":
        letter = _LETTER.search(given)
        return letter is not None and letter[1] == gold
    values = _value(given), _value(gold)
    if values[1] is not None:
        return values[0] == values[1]
    return " ".join(given.lower().split()) == " ".join(gold.rstrip(".").lower().split())


def leaks(thought: str, gold: str) -> bool:
    """Return whether a thought contains the answer as a separate word or number.

    >>> leaks("8,17,19", "19"), leaks("8,17,190", "19"), leaks("", "19")
    (True, False, False)
    """
    answer = re.escape(composed(gold.strip()))
    found = re.search(rf"(?<![\w]){answer}(?![\w])", composed(thought), re.IGNORECASE)
    return found is not None


def _anchored(text: str) -> str | None:
    lowered = text.lower()
    for anchor in _ANCHORS:
        place = lowered.rfind(anchor)
        if place >= 0:
            return _first_line(text[place + len(anchor) :])
    return None


def _integer(text: str) -> str | None:
    found = _INTEGER.search(text)
    return found[0].replace(",", "") if found else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _value(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "").removeprefix("$")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


QUESTION = "{question}"


@chz.chz
class Template:
    """The prompts of the writer of a thought and of its reader, in words.

    Both prompts are one template. The writer's contains the question and continues with a thought.
    The reader's contains a redaction mark in place of the question, the thought, and a mark after
    which it answers.
    """

    _types = chz.validate(check_types)

    text: str = chz.field(
        default="You will be shown a question. First write, briefly, all that is needed to answer "
        "it: the answer will be read from what you write, and the question may not be there any "
        "more.\n\nQuestion: {question}\n\nReasoning:",
        doc="text before the thought; {question} is the question, or the redaction mark",
    )
    redaction: str = chz.field(default="[redacted]", doc="replaces the question for the reader")
    answer_mark: str = chz.field(default="\nAnswer: ", doc="text between thought and answer")
    chat: bool = chz.field(default=True, doc="apply the tokenizer's chat template, if it has one")

    @chz.validate
    def _marks(self) -> None:
        if (count := self.text.count(QUESTION)) != 1:
            raise ConfigError(f"template.text must have {QUESTION} once, found {count} times")

    def prompt(self, question: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens before a thought."""
        before, _, after = self.text.partition(QUESTION)
        return render_prompt(tokenizer, f"{before}{question}{after}", chat=self.chat)

    def answer(self, answer: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the mark's tokens and the answer's, which has the mark's trailing spaces."""
        mark = self.answer_mark.rstrip(" ")
        text = self.answer_mark[len(mark) :] + answer
        return as_text(tokenizer, mark), as_text(tokenizer, text)


@chz.chz
class Compact(Template):
    """The prompts for the bundled character-level model: `3+5+9+2:=8,17,19>19`."""

    text: str = chz.field(default="{question}:", doc="text before the thought")
    redaction: str = chz.field(default="?", doc="replaces the question")
    answer_mark: str = chz.field(default=">", doc="text between thought and answer")
    chat: bool = chz.field(default=False, doc="put the text into the tokenizer's chat template")


TEMPLATE_NAMES = Registered("templates")


@dataclasses.dataclass(frozen=True)
class TokenizedProblem:
    """The prompts of one problem: for the writer of a thought, and for its reader.

    A thought is read as its text, not as the sampled tokens: how a text is cut into tokens could
    carry information that is not in the text. Names of special tokens in it are plain text.

    Attributes:
        tokenizer: the model's own.
        observation: the writer's prompt.
        before_T: tokens before the thought in the reader's prompt.
        mark_T: tokens between thought and answer.
        gold: the answer.
        gold_T: tokens of the answer, at least one.
        answer_tokens: maximum length of a sampled answer.
        extraction: where to find the answer in a text.
        thought: hand-written, if known.
    """

    tokenizer: Tokenizer
    observation: Observation
    before_T: tuple[int, ...]
    mark_T: tuple[int, ...]
    gold: str
    gold_T: tuple[int, ...]
    answer_tokens: int
    extraction: Extraction
    thought: str | None = None

    @property
    def least(self) -> int:
        """Tokens that reading takes without a thought: the prompt, the mark and an answer."""
        return len(self.before_T) + len(self.mark_T) + max(len(self.gold_T), self.answer_tokens)

    def read_T(self, thought: str, context_length: int) -> tuple[int, ...]:
        """Return the tokens before the answer; a thought that does not fit loses its end."""
        room = max(context_length - self.least, 0)
        return self.before_T + as_text(self.tokenizer, thought)[:room] + self.mark_T

    async def read(self, thought: str, policy: Policy) -> Reading:
        """Read the answer after a thought: its log-probabilities under the policy."""
        prompt_T = self.read_T(thought, policy.context_length)
        logprobs_T = await policy.logprobs(prompt_T, self.gold_T)
        return Reading(prompt_T, self.gold_T, tuple(logprobs_T))

    async def logprob(self, thought: str, policy: Policy) -> float:
        """Return the mean log-probability of the answer's tokens after a thought, in nats."""
        return mean_logprob(await self.read(thought, policy))

    async def answer(self, thought: str, policy: Policy) -> str:
        """Return the policy's greedy answer after a thought."""
        observation = Observation(self.read_T(thought, policy.context_length), is_last=True)
        params = SamplingParams(max_tokens=self.answer_tokens)
        return (await policy.sample(observation, params)).text

    def is_right(self, text: str) -> bool:
        """Return whether a text contains the right answer."""
        return is_right(given_answer(text, self.gold, self.extraction), self.gold)


def mean_logprob(reading: Reading) -> float:
    """Return the mean log-probability of the tokens that were read."""
    return math.fsum(reading.logprobs_T) / len(reading.logprobs_T)


class MarkovianEnv(ProblemEnv):
    """One thought about one question."""

    def __init__(self, tokenized: TokenizedProblem) -> None:
        super().__init__(tokenized.observation)
        self.tokenized = tokenized

    @override
    async def graded(self, text: str) -> Grade:
        """Return reward and metrics: `correct`, `logprob`, `leaks`."""
        reading = await self.tokenized.read(text, self.policy)
        logprob = mean_logprob(reading)
        answer = await self.tokenized.answer(text, self.policy)
        metrics = {
            "correct": float(self.tokenized.is_right(answer)),
            "logprob": logprob,
            "leaks": float(leaks(text, self.tokenized.gold)),
        }
        return Grade(logprob, metrics, {"answer": answer}, reading)


@dataclasses.dataclass(frozen=True, slots=True)
class MarkovianProblem(ProblemGroupBuilder):
    """One question; its group reward is that of the base with its own thought."""

    question: str = dataclasses.field(kw_only=True)
    tokenized: TokenizedProblem = dataclasses.field(kw_only=True)

    @override
    async def check(self, context_length: int) -> None:
        """Check that the writer's prompt and the reader's without a thought fit the context."""
        await ProblemGroupBuilder.check(self, context_length)
        check_prompt(self.name, self.tokenized.least, context_length)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        base = policies[0].base
        thought = (await base.sample(self.tokenized.observation)).text
        logprob = await self.tokenized.logprob(thought, base)
        return [GroupReward(-logprob, {"base_logprob": logprob}) for _ in trajectories]
