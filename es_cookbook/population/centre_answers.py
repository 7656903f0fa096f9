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
from es_cookbook.engines.base import Engine, LogprobsRequest, Progress, SampleRequest, Top
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import Example, mean_rewards, sequences_of
from es_cookbook.rl.surrogate import AnswersProblem
from es_cookbook.rl.types import Action, EnvGroupBuilder, Trajectory, TrajectoryGroup

SECONDS_BETWEEN_LINES = 5.0
"""Also between looks for something said, once time is up; at least."""


@dataclasses.dataclass(frozen=True, slots=True)
class CentreAnswers:
    """What the centre said, for genomes to read.

    Attributes:
        answers_P: those of a rollout, or one answer where rollouts were cut.
        num_tokens: that the centre says in a rollout; expected, where they were cut.
        rewards_P: of the centre's rollouts; None where they were cut.
        seconds: that they took.
        scale: nats that a rollout loses, over the mean that `answers_P` lose.
    """

    answers_P: Sequence[AnswersProblem]
    num_tokens: float
    rewards_P: NDArray[np.float64] | None
    seconds: float
    scale: float = 1.0

    @property
    def cost(self) -> int:
        """Of reading them: tokens, and those that are scored twice, which have logits too."""
        return sum(problem.num_tokens + _num_said(problem) for problem in self.answers_P)

    @property
    def longest(self) -> int:
        """Tokens of the model in the longest answer."""
        return max(map(_num_said, self.answers_P))

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
    sampler: PopulationSampler, problems_P: Sequence[EnvGroupBuilder], seconds: float
) -> CentreAnswers:
    """Have the centre attempt the problems once each, for so many seconds.

    Longer where nothing was said by then: until something is said, or all answers have ended.
    Without `answers_P` if it gives no answer.

    Raises:
        TooManyLostError: As `PopulationSampler.rollout_centre`.
    """
    began = time.perf_counter()
    # Which tokens are the model's own, and not an Env's, shows in their log-probabilities.
    sampling = chz.replace(sampler.sampling, logprobs=True)
    listening = _Listening(sampler.engine)
    centre = dataclasses.replace(sampler, engine=listening)
    groups_P: Sequence[TrajectoryGroup] | None = None
    with anyio.CancelScope() as scope:
        async with _watched(listening, len(problems_P) * sampling.max_tokens, seconds, scope):
            groups_P = await centre.rollout_centre(problems_P, sampling, generation=0)
    took = time.perf_counter() - began
    if groups_P is None:
        said = [heard for heard in listening.heard if heard.tokens_T]
        expected = sum(_expected_lengths(listening.heard)) / len(problems_P)
        mean = sum(len(heard.tokens_T) for heard in said) / len(said)
        answers_P = [heard.answer for heard in said]
        return CentreAnswers(answers_P, expected, None, took, expected / mean)
    answers_P = list(_whole(groups_P))
    num_tokens = sum(map(_num_said, answers_P)) / max(1, len(answers_P))
    return CentreAnswers(answers_P, num_tokens, mean_rewards(groups_P)[:, 0], took)


def _whole(groups_P: Iterable[TrajectoryGroup]) -> Iterator[AnswersProblem]:
    for group in groups_P:
        for trajectory in group.trajectories_G_K[0]:
            if isinstance(trajectory, Trajectory) and (said := sequences_of(trajectory, 1.0)):
                yield AnswersProblem([dataclasses.replace(s, sampled_T=()) for s in said])


class _Heard(Progress):
    """One answer, as far as it has come."""

    follows = True

    def __init__(self, request: SampleRequest) -> None:
        self.prompt_T = request.observation.tokens_T
        self.tokens_T: tuple[int, ...] = ()
        self.most = request.params.max_tokens
        self.was_told = self.is_over = self.has_ended = False
        self.seconds = 0.0

    @override
    def sampled(self, tokens_T: Sequence[int]) -> None:
        self.tokens_T, self.was_told = tuple(tokens_T), True

    def done(self, action: Action) -> None:
        self.tokens_T, self.is_over = action.tokens_T, True
        self.has_ended = action.stop_reason == "stop"

    @property
    def answer(self) -> AnswersProblem:
        learned_T = (False,) * len(self.prompt_T) + (True,) * len(self.tokens_T)
        return AnswersProblem([Example(self.prompt_T + self.tokens_T, learned_T)])


def _expected_lengths(heard_A: Sequence[_Heard]) -> Iterator[float]:
    """Tokens of each answer in its end, if any token may be the last with one probability."""
    lengths_A = _lengths_by_now(heard_A)
    is_last = sum(heard.has_ended for heard in heard_A) / sum(lengths_A)
    for heard, length in zip(heard_A, lengths_A, strict=True):
        room = 0 if heard.is_over else max(0, heard.most - length)
        yield length + (-math.expm1(-is_last * room) / is_last if is_last else room)


def _lengths_by_now(heard_A: Sequence[_Heard]) -> Sequence[float]:
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
        while not any(heard.tokens_T for heard in listening.heard):
            await anyio.sleep(max(seconds, SECONDS_BETWEEN_LINES))
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        tasks.start_soon(cut)
        yield
        tasks.cancel_scope.cancel()


class _Listening(Engine):
    """An engine that keeps what it samples, also before it ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.traits, self.tokenizer, self.space = engine.traits, engine.tokenizer, engine.space
        self.heard: list[_Heard] = []

    @override
    async def sample(self, request: SampleRequest) -> Action:
        if request.target != "centre" or not request.params.logprobs:  # An Env's own question.
            return await self._engine.sample(request)
        heard = _Heard(request)
        self.heard.append(heard)
        began = time.perf_counter()
        try:
            action = await self._engine.sample(dataclasses.replace(request, progress=heard))
        finally:
            heard.seconds = time.perf_counter() - began
        heard.done(action)
        return action

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
