"""Answers of the centre to a few problems, within a time: whole ones, or their beginnings.

An answer may have no end before `sampling.max_tokens`, and a token of a large model may take long.
So engines tell of answers while they are sampled. When time is up, what was said until then is
taken, and how long it would have become follows from how many have ended: answers are taken to end
with the same probability at each token. A pool tells of no answer before it ends: those that still
run are taken to be as far as the others' pace brings them.

Left out: turns that were still to come in a rollout that was cut.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path

import anyio
import chz
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from es_cookbook.common.terminal import say
from es_cookbook.engines.base import Engine, LogprobsRequest, SampleRequest, Top
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.population.look import Heard, Look, Turn, look_at
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.population.underway import Rollouts, Underway
from es_cookbook.rl.rollouts import Example, mean_rewards, sequences_of
from es_cookbook.rl.surrogate import AnswersProblem
from es_cookbook.rl.types import (
    Action,
    EnvGroupBuilder,
    LostRollout,
    Observation,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)

SECONDS_BETWEEN_LINES = 5.0
"""Also between looks for something said, once time is up; at least."""
_SECONDS_OF_PACE, _TOKENS_OF_PACE = 3.0, 4
"""After so long, and so many tokens each, answers that are there for the pace have shown it."""
_TOKENS_OF_BEGINNING = 8
"""In half of the answers that are cut, at the least, unless that takes twice the time: from two
tokens nobody can tell how an answer goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class CentreAnswers:
    """What the centre said, for genomes to read.

    Attributes:
        answers_P: those of a rollout, or one answer where rollouts were cut.
        num_tokens: that the centre says in a rollout; expected, where they were cut.
        rewards_P: of the centre's rollouts; None where they were cut.
        seconds: that they took.
        look: what they show.
        scale: nats that a rollout loses, over the mean that `answers_P` lose.
    """

    answers_P: Sequence[AnswersProblem]
    num_tokens: float
    rewards_P: NDArray[np.float64] | None
    seconds: float
    look: Look
    scale: float = 1.0

    @property
    def cost(self) -> int:
        """Of reading them: tokens, and those that are scored twice, which have logits too."""
        return sum(problem.num_tokens + _num_said(problem) for problem in self.answers_P)

    @property
    def longest(self) -> int:
        """Tokens of the model in the longest answer."""
        return max(map(_num_said, self.answers_P))

    def first(self, num_answers: int) -> "CentreAnswers":
        """The first answers, as if no others had been asked for."""
        if len(self.answers_P) <= num_answers:
            return self
        share = num_answers / len(self.answers_P)
        rewards_P = None if self.rewards_P is None else self.rewards_P[:num_answers]
        first = self.shortened(num_answers, self.longest)
        return dataclasses.replace(first, rewards_P=rewards_P, seconds=share * self.seconds)

    def shortened(self, num_answers: int, num_tokens: int) -> "CentreAnswers":
        """The first answers, and of each rollout the first tokens that the model said."""
        answers_P = [_shortened(each, num_tokens) for each in self.answers_P[:num_answers]]
        before, now = (sum(map(_num_said, each)) for each in (self.answers_P, answers_P))
        share = (now / len(answers_P)) / (before / len(self.answers_P))
        return dataclasses.replace(self, answers_P=answers_P, scale=self.scale / share)


def _num_said(problem: AnswersProblem) -> int:
    return sum(sum(answer.learned_T) for answer in problem.answers)


def _shortened(problem: AnswersProblem, num_tokens: int) -> AnswersProblem:
    answers: list[Example] = []
    for answer in problem.answers:
        said_T = np.cumsum(answer.learned_T)
        end = int(np.searchsorted(said_T, min(num_tokens, said_T[-1]))) + 1
        answers.append(
            dataclasses.replace(
                answer, tokens_T=answer.tokens_T[:end], learned_T=answer.learned_T[:end]
            )
        )
        num_tokens -= int(said_T[end - 1])
        if num_tokens <= 0:
            break
    return dataclasses.replace(problem, answers=answers)


async def centre_answers(
    sampler: PopulationSampler,
    problems_P: Sequence[EnvGroupBuilder],
    seconds: float,
    num_kept: int | None = None,
) -> CentreAnswers:
    """Have the centre attempt the problems once each, for so many seconds.

    All of them only where `num_kept` is None: answers to problems behind the first so many are
    there for the pace, and are cut as soon as they have shown it. They may be the same
    problems.

    Longer where little was said by then: up to twice as long, and where nothing was, until
    something is said or all answers have ended.
    Without `answers_P` if it gives no answer.

    Raises:
        TooManyLostError: As `PopulationSampler.rollout_centre`.
    """
    began = time.perf_counter()
    # Which tokens are the model's own, and not an Env's, shows in their log-probabilities.
    sampling = chz.replace(sampler.sampling, logprobs=True)
    num_kept = len(problems_P) if num_kept is None else num_kept
    listening = _Listening(sampler.engine, range(num_kept, len(problems_P)))
    centre = dataclasses.replace(sampler, engine=listening)
    centre.underway = earned = _Earned()
    groups_P: Sequence[TrajectoryGroup] | None = None
    with anyio.CancelScope() as scope:
        async with _watched(listening, len(problems_P) * sampling.max_tokens, seconds, scope):
            groups_P = await centre.rollout_centre(problems_P, sampling, generation=0)
    took = time.perf_counter() - began
    for heard in listening.heard:
        heard.stop(sampler.engine.tokenizer)
    look = look_at(listening.heard, problems_P, earned.rewards, sampler.engine.tokenizer)
    if groups_P is None:
        kept = [heard for heard in listening.heard if not heard.is_extra]
        said = [heard for heard in kept if heard.tokens_T]
        expected = sum(_expected_lengths(kept)) / min(num_kept, len(problems_P))
        mean = sum(len(heard.tokens_T) for heard in said) / len(said)
        answers_P = [_answer_of(heard) for heard in said]
        return CentreAnswers(answers_P, expected, None, took, look, expected / mean)
    groups_P = groups_P[:num_kept]
    answers_P = list(_whole(groups_P))
    num_tokens = sum(map(_num_said, answers_P)) / max(1, len(answers_P))
    return CentreAnswers(answers_P, num_tokens, mean_rewards(groups_P)[:, 0], took, look)


async def seconds_of_reading(
    engine: Engine, observations: Sequence[Observation], params: SamplingParams
) -> float:
    """Seconds of a token of prompts that the engine does not know yet; it says a token to each."""
    params, began = chz.replace(params, max_tokens=1), time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for observation in observations:
            tasks.start_soon(engine.sample, SampleRequest("centre", observation, params))
    num_tokens = sum(len(observation.tokens_T) for observation in observations)
    return (time.perf_counter() - began) / num_tokens


def _whole(groups_P: Iterable[TrajectoryGroup]) -> Iterator[AnswersProblem]:
    for group in groups_P:
        for trajectory in group.trajectories_G_K[0]:
            if isinstance(trajectory, Trajectory) and (said := sequences_of(trajectory, 1.0)):
                yield AnswersProblem([dataclasses.replace(s, sampled_T=()) for s in said])


def _answer_of(heard: Heard) -> AnswersProblem:
    learned_T = (False,) * len(heard.prompt_T) + (True,) * len(heard.tokens_T)
    return AnswersProblem([Example(heard.prompt_T + heard.tokens_T, learned_T)])


def _expected_lengths(heard_A: Sequence[Heard]) -> Iterator[float]:
    """Tokens of each answer in its end, if any token may be the last with one probability."""
    lengths_A = _lengths_by_now(heard_A)
    is_last = sum(heard.has_ended for heard in heard_A) / sum(lengths_A)
    for heard, length in zip(heard_A, lengths_A, strict=True):
        room = 0 if heard.is_over else max(0, heard.most - length)
        yield length + (-math.expm1(-is_last * room) / is_last if is_last else room)


def _lengths_by_now(heard_A: Sequence[Heard]) -> Sequence[float]:
    """Tokens that each answer has; where the engine told of none before its end, by their pace.

    An engine that tells has not begun those that it told nothing of.
    """
    if any(heard.was_told for heard in heard_A):
        return [len(heard.tokens_T) for heard in heard_A]
    over = [heard for heard in heard_A if heard.is_over]
    longest = max(len(heard.tokens_T) for heard in over)
    pace = sum(len(heard.tokens_T) for heard in over) / sum(heard.seconds for heard in over)
    return [
        len(heard.tokens_T)
        if heard.is_over
        else min(heard.most, max(longest, pace * heard.seconds))
        for heard in heard_A
    ]


@contextlib.asynccontextmanager
async def _watched(
    listening: "_Listening", most: int, seconds: float, scope: anyio.CancelScope
) -> AsyncGenerator[None]:
    """Inside, every few seconds, how far answers have come; cancels `scope` when time is up."""

    async def tell() -> None:
        while True:
            await anyio.sleep(SECONDS_BETWEEN_LINES)
            said = sum(len(heard.tokens_T) for heard in listening.heard)
            say(f"  {said:,} tokens of the centre's answers, at most {most:,} a turn")

    async def cut() -> None:
        await anyio.sleep(seconds)
        with anyio.move_on_after(seconds):
            while not listening.has_beginnings:
                await anyio.sleep(seconds / 10)
        while not any(heard.tokens_T for heard in listening.heard):
            await anyio.sleep(max(seconds, SECONDS_BETWEEN_LINES))
        scope.cancel()

    async def drop() -> None:
        await anyio.sleep(_SECONDS_OF_PACE)
        while not listening.has_pace:
            await anyio.sleep(_SECONDS_OF_PACE / 10)
        listening.drop_extra()

    async with anyio.create_task_group() as tasks:
        if listening.extra:
            tasks.start_soon(drop)
        tasks.start_soon(tell)
        tasks.start_soon(cut)
        yield
        tasks.cancel_scope.cancel()


class _Earned(Underway):
    """Keeps what rollouts earned that have ended, by their first prompt and what was said to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards: dict[Turn, float] = {}

    @override
    def begin(self, generation: int | None, count: int) -> Rollouts:
        rollouts = self.rollouts = _EarnedByRollouts(generation, count)
        rollouts.rewards = self.rewards
        return rollouts


class _EarnedByRollouts(Rollouts):
    rewards: dict[Turn, float]

    @override
    def ended(self, rollout: Trajectory | LostRollout, has_reward: bool) -> None:
        if has_reward and isinstance(rollout, Trajectory) and rollout.transitions:
            first = rollout.transitions[0]
            self.rewards[first.observation.tokens_T, first.action.tokens_T] = rollout.reward


class _Listening(Engine):
    """An engine that keeps what it samples, also before it ends.

    Args:
        engine: samples.
        extra: which of the answers are there for the pace alone, by number.
    """

    def __init__(self, engine: Engine, extra: range) -> None:
        self._engine, self.extra = engine, extra
        self.traits, self.tokenizer, self.space = engine.traits, engine.tokenizer, engine.space
        self.heard: list[Heard] = []
        self._scopes: list[anyio.CancelScope] = []
        """Of the extra ones."""
        self._warming, self._is_warm = anyio.Lock(), not extra

    @property
    def has_pace(self) -> bool:
        """Whether the extra answers have shown it."""
        lengths = [len(heard.tokens_T) for heard in self.heard if heard.is_extra]
        return bool(lengths) and min(lengths) > 0 and sum(lengths) >= _TOKENS_OF_PACE * len(lengths)

    @property
    def has_beginnings(self) -> bool:
        """Whether the answers that are kept have ended, or say enough to be more than a word."""
        kept = [heard for heard in self.heard if not heard.is_extra]
        lengths = [math.inf if heard.is_over else len(heard.tokens_T) for heard in kept]
        return bool(lengths) and float(np.median(lengths)) >= _TOKENS_OF_BEGINNING

    def drop_extra(self) -> None:
        """Cut the extra answers that are still given."""
        for scope in self._scopes:
            scope.cancel()

    @override
    async def sample(self, request: SampleRequest) -> Action:
        if request.target != "centre" or not request.params.logprobs:  # An Env's own question.
            return await self._engine.sample(request)
        await self._warm_up(request)
        number = len(self.heard)
        is_first = number < self.extra.stop
        heard = Heard(request, is_first=is_first, is_extra=number in self.extra)
        self.heard.append(heard)
        with anyio.CancelScope() as scope:
            if heard.is_extra:
                self._scopes.append(scope)
            # Log-probabilities of a large vocabulary take time that genomes' answers do not.
            params = chz.replace(request.params, logprobs=False)
            request = dataclasses.replace(request, params=params, progress=heard)
            heard.done(action := await self._engine.sample(request))
            return dataclasses.replace(action, logprobs_T=(0.0,) * len(action.tokens_T))
        heard.cut()
        return Action(heard.tokens_T, "", "length", (0.0,) * len(heard.tokens_T))

    async def _warm_up(self, request: SampleRequest) -> None:
        """Compile and pack what the first answer needs, which is no part of the pace."""
        async with self._warming:  # The others wait, and go on in their order.
            if not self._is_warm:
                params = chz.replace(request.params, max_tokens=1)
                await self._engine.sample(dataclasses.replace(request, params=params))
                self._is_warm = True

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        await self._engine.load(genomes_G)

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        return await self._engine.logprobs(request)

    @override
    async def tops(self, request: LogprobsRequest) -> list[Top]:
        return await self._engine.tops(request)

    @override
    async def apply(self, step: Step) -> int:
        return await self._engine.apply(step)

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        return await self._engine.restore(steps, snapshot)

    @override
    async def save(self, path: Path) -> None:
        await self._engine.save(path)

    @override
    def stats(self) -> dict[str, float]:
        return dict(self._engine.stats())

    @override
    async def close(self) -> None:
        await self._engine.close()
