"""What the first answers of a run's centre show: how good they are, how long, and how fast.

They tell how long a run takes before it is begun. Reading prompts and sampling take their time one
after the other while all answers begin together: up to the moment when nearly all have a first
token it is mostly the former, from there on the latter. The rate of sampling is taken while few
answers have ended, since fewer rows take more time each.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from typing_extensions import override

from es_cookbook.engines.base import Progress, SampleRequest
from es_cookbook.rl.data.problem_dataset import unchanged
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.encoder import inside
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.rollouts import gold_of
from es_cookbook.rl.types import Action, EnvGroupBuilder, Observation, Tokenizer

_BEGUN, _MOST_OVER = 0.9, 0.25
"""Shares of the answers: have a first token when prompts count as read; are over when the rate of
sampling is no longer taken."""
_LEAST_SECONDS = 0.1
"""Of sampling, for a rate."""

Turn: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a prompt, and of the answer to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that an engine takes for a token, while it works on many answers at once.

    Attributes:
        prompt: of a prompt.
        sampled: of an answer.
    """

    prompt: float
    sampled: float

    def seconds(self, prompt_tokens: float, sampled_tokens: float) -> float:
        """Of one rollout among many."""
        return prompt_tokens * self.prompt + sampled_tokens * self.sampled


class Heard(Progress):
    """One answer, as far as it has come.

    Attributes:
        is_first: it is the first turn of a rollout.
        is_extra: it is there for the pace alone.
    """

    follows = True

    def __init__(
        self, request: SampleRequest, *, is_first: bool = True, is_extra: bool = False
    ) -> None:
        self.is_first, self.is_extra = is_first, is_extra
        self.prompt_T = request.observation.tokens_T
        self.tokens_T: tuple[int, ...] = ()
        self.most = request.params.max_tokens
        self.text = ""
        self.was_told = self.is_over = self.has_ended = False
        self.began, self.seconds = time.perf_counter(), 0.0
        self.told_at: list[tuple[float, int]] = []
        """When, and how many tokens there were."""

    @override
    def sampled(self, tokens_T: Sequence[int]) -> None:
        self.tokens_T, self.was_told = tuple(tokens_T), True
        self.told_at.append((time.perf_counter(), len(self.tokens_T)))

    def done(self, action: Action) -> None:
        self.tokens_T, self.text, self.is_over = action.tokens_T, action.text, True
        self.has_ended = action.stop_reason == "stop"
        self.told_at.append((time.perf_counter(), len(self.tokens_T)))
        self.seconds = self.told_at[-1][0] - self.began

    def cut(self) -> None:
        """It has been cut: from now on fewer answers are under way."""
        self.is_over = True
        self.told_at.append((time.perf_counter(), len(self.tokens_T)))

    def stop(self, tokenizer: Tokenizer) -> None:
        """Whatever comes now comes too late."""
        if not self.is_over:
            self.seconds = time.perf_counter() - self.began
            self.text = AnswerTexts(tokenizer).text(self.tokens_T)


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One of the answers.

    Attributes:
        text: what was said.
        prompt_tokens: of its prompt.
        num_tokens: of itself.
        ending: "stop" by itself, "length" at `sampling.max_tokens`, "clock" for lack of time.
        reward: NaN where it is not known.
        gold: the perfect answer, where one is known.
        gold_tokens: of it; 0 where none is known.
    """

    text: str
    prompt_tokens: int
    num_tokens: int
    ending: Literal["stop", "length", "clock"]
    reward: float
    gold: str | None = None
    gold_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """The first answers of a centre.

    Attributes:
        answers: in the order in which they began; of several turns each is one.
        pace: None where too little was heard.
        num_rollouts: that they are of.
    """

    answers: Sequence[Answer]
    pace: Pace | None
    num_rollouts: int = 1

    @property
    def rewards(self) -> Sequence[float]:
        """Those that are known."""
        return [answer.reward for answer in self.answers if not math.isnan(answer.reward)]


def look_at(
    heard: Sequence[Heard],
    problems_P: Sequence[EnvGroupBuilder],
    rewards: Mapping[Turn, float],
    tokenizer: Tokenizer,
) -> Look:
    """What these answers show.

    Args:
        heard: all turns of all rollouts.
        problems_P: that were asked.
        rewards: of rollouts, by their first turn.
        tokenizer: the model's own.
    """
    golds = _golds(problems_P)
    lengths = {gold: len(inside(tokenizer, gold)) for gold in golds.values()}
    answers = [
        Answer(
            each.text,
            len(each.prompt_T),
            len(each.tokens_T),
            ("stop" if each.has_ended else "length") if each.is_over else "clock",
            rewards.get((each.prompt_T, each.tokens_T), math.nan),
            golds.get(each.prompt_T),
            lengths.get(golds.get(each.prompt_T, ""), 0),
        )
        for each in heard
        if not each.is_extra and (each.is_over or each.tokens_T)
    ]
    firsts = [each for each in heard if each.is_first and not each.is_extra]
    return Look(answers, pace_of(heard), max(1, len(firsts)))


def _golds(problems_P: Sequence[EnvGroupBuilder]) -> Mapping[tuple[int, ...], str]:
    """Gold answers by prompt."""
    pairs = ((observation_of(problem), gold_of(unchanged(problem))) for problem in problems_P)
    return {asked.tokens_T: gold for asked, gold in pairs if asked and gold is not None}


def observation_of(problem: EnvGroupBuilder) -> Observation | None:
    """What a problem of one turn asks."""
    problem = unchanged(problem)
    env = problem.make_env() if isinstance(problem, ProblemGroupBuilder) else None
    return env.observation if isinstance(env, ProblemEnv) else None


def pace_of(heard: Sequence[Heard]) -> Pace | None:
    """Seconds of a token, prompts and answers apart if the engine told of answers meanwhile."""
    told = [each for each in heard if each.told_at]
    num_tokens = sum(len(each.tokens_T) for each in told)
    if not num_tokens:
        return None
    began = min(each.began for each in told)
    ended = max(each.told_at[-1][0] for each in told)
    firsts = sorted(each.told_at[0][0] for each in told)
    read_at = firsts[min(len(firsts) - 1, int(_BEGUN * len(heard)))]
    overs = sorted(each.told_at[-1][0] for each in told if each.is_over)
    num_over = int(_MOST_OVER * len(heard))
    few_at = overs[num_over] if num_over < len(overs) else ended
    sampled = _between(told, read_at, few_at)
    if few_at - read_at < _LEAST_SECONDS or sampled < len(told):
        seconds = max(ended - began, 1e-6)
        return Pace(0.0, seconds / num_tokens)
    rate = (few_at - read_at) / sampled
    prompts = {each.prompt_T for each in heard}  # Engines read the same one once.
    # Its first answer comes with it, the first token of others takes what any token does.
    before = _between(told, began, read_at) - len(prompts)
    return Pace(max(0.0, read_at - began - before * rate) / sum(map(len, prompts)), rate)


def _between(told: Sequence[Heard], begin: float, end: float) -> int:
    """Tokens that were sampled from one moment to another."""
    return sum(_by(each, end) - _by(each, begin) for each in told)


def _by(heard: Heard, moment: float) -> int:
    """Tokens that an answer had at a moment."""
    times = [at for at, _ in heard.told_at]
    place = int(np.searchsorted(times, moment, side="right"))
    return heard.told_at[place - 1][1] if place else 0
