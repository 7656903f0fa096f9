"""The centre's first answers to a few problems: their texts, lengths and speed.

A run that finds its step sizes or its own length looks at them before it begins. An answer may have
no end before `sampling.max_tokens`, and a token of a large model may take long. So the problems are
attempted with few tokens first, and again with more of them, as long as the time allows. Where
answers are still cut in the end, their lengths are estimated: an answer is taken to end with the
same probability at each token.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import anyio
import chz
import numpy as np

from es_cookbook.engines.base import SampleRequest
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.data.problem_dataset import unchanged
from es_cookbook.rl.messages.encoder import inside
from es_cookbook.rl.rollouts import Example, gold_of, mean_rewards, sequences_of
from es_cookbook.rl.surrogate import AnswersProblem
from es_cookbook.rl.types import EnvGroupBuilder, Observation, Tokenizer, Trajectory, Transition

_LEAST_TOKENS = 8
"""Room of an answer even if that takes longer: two tokens do not show how it goes on."""
_GROWTH = 8.0
"""Largest factor from one attempt's tokens to the next's."""
_ROWS = 128
"""Answers sampled at once to measure the pace of many: of 32, each takes 1.5 times as long on a
CPU. They are to the same problems, since prompts take their time as well."""
_TOKENS_OF_PACE = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per token of an engine that works on many answers at once.

    Attributes:
        prompt: per token of a prompt.
        sampled: per token of an answer.
    """

    prompt: float
    sampled: float

    def seconds(self, prompt_tokens: float, sampled_tokens: float) -> float:
        """Estimate the time of one rollout among many."""
        return prompt_tokens * self.prompt + sampled_tokens * self.sampled


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the centre.

    Attributes:
        text: text of the answer.
        prompt_tokens: length of its prompt.
        num_tokens: its own length.
        ending: "stop" by itself, "length" at `sampling.max_tokens`, "clock" for lack of time.
        reward: NaN if unknown.
        gold: the perfect answer, if one is known.
        gold_tokens: its length; 0 if none is known.
    """

    text: str
    prompt_tokens: int
    num_tokens: int
    ending: Literal["stop", "length", "clock"]
    reward: float
    gold: str | None = None
    gold_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerSample:
    """A sample of the centre's answers.

    Attributes:
        answers: one per turn, rollout after rollout.
        pace: None if it was not measured.
        num_rollouts: number of rollouts they come from.
    """

    answers: Sequence[Answer]
    pace: Pace | None = None
    num_rollouts: int = 1

    @property
    def rewards(self) -> Sequence[float]:
        """The known rewards."""
        return [answer.reward for answer in self.answers if not math.isnan(answer.reward)]


@dataclasses.dataclass(frozen=True, slots=True)
class CentreAnswers:
    """The centre's answers, for genomes to score.

    Attributes:
        problems_P: the problems that it attempted.
        answers_P: one for each rollout in which it said something.
        num_tokens: expected length of the answers of a rollout.
        sample: the same answers one by one.
        prompts: the first prompt of each rollout.
        scale: nats that a rollout loses, over the mean that `answers_P` lose.
    """

    problems_P: Sequence[EnvGroupBuilder]
    answers_P: Sequence[AnswersProblem]
    num_tokens: float
    sample: AnswerSample
    prompts: Sequence[Observation] = ()
    scale: float = 1.0

    @property
    def cost(self) -> int:
        """Cost of scoring them: all tokens, and again those that have logits."""
        return sum(problem.num_tokens + _num_said(problem) for problem in self.answers_P)

    @property
    def longest(self) -> int:
        """Tokens of the model in the longest answer."""
        return max(map(_num_said, self.answers_P))

    def shortened(self, num_answers: int, num_tokens: int) -> "CentreAnswers":
        """Keep the first answers, and in each rollout the first tokens that the model said."""
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
    """Have the centre attempt the problems once each, with as many tokens as fit into the time.

    Without `answers_P` if it gives no answer.

    Raises:
        TooManyLostError: As `PopulationSampler.rollout_centre`.
    """
    end_at, most, room = time.perf_counter() + seconds, sampler.sampling.max_tokens, 1
    while True:
        began = time.perf_counter()
        # Which tokens are the model's own, and not an Env's, shows in their log-probabilities.
        sampling = chz.replace(sampler.sampling, max_tokens=room, logprobs=True)
        groups_P = await sampler.rollout_centre(problems_P, sampling, generation=0)
        took = time.perf_counter() - began
        rewards_P = mean_rewards(groups_P)[:, 0].tolist()
        rollouts = [
            _Rollout(unchanged(problem), rollout, reward, room, most)
            for problem, group, reward in zip(problems_P, groups_P, rewards_P, strict=True)
            if isinstance(rollout := group.trajectories_G_K[0][0], Trajectory)
        ]
        growth = min(_GROWTH, (end_at - time.perf_counter()) / max(took, 1e-9))
        if not any(each.is_cut for each in rollouts) or (room >= _LEAST_TOKENS and growth < 2):
            break
        room = min(most, max(_LEAST_TOKENS, int(room * growth)))

    said = [each for each in rollouts if each.trajectory.num_tokens]
    tokenizer = sampler.engine.tokenizer
    sample = AnswerSample(
        [answer for each in said for answer in each.answers(tokenizer)], None, len(said)
    )
    found = [sequences_of(each.trajectory, 1.0) for each in said]
    answers_P = [AnswersProblem([dataclasses.replace(s, sampled_T=()) for s in f]) for f in found]
    num_said = sum(each.trajectory.num_tokens for each in said)
    is_last = sum(not each.is_cut for each in said) / max(1, num_said)
    expected = math.fsum(each.expected_tokens(is_last) for each in said)
    return CentreAnswers(
        problems_P,
        answers_P,
        num_tokens=expected / max(1, len(said)),
        sample=sample,
        prompts=[each.trajectory.transitions[0].observation for each in said],
        scale=expected / max(1, num_said),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Rollout:
    """One of the centre's rollouts, with `room` tokens for each answer in place of `most`."""

    problem: EnvGroupBuilder
    trajectory: Trajectory
    reward: float
    room: int
    most: int

    @property
    def is_cut(self) -> bool:
        """Whether an answer would have gone on with more room."""
        return any(map(self._cuts, self.trajectory.transitions))

    def _cuts(self, turn: Transition) -> bool:
        is_full = turn.action.stop_reason == "length" and len(turn.action.tokens_T) == self.room
        return is_full and self.room < self.most

    def answers(self, tokenizer: Tokenizer) -> Iterator[Answer]:
        """Yield its answers; the first has the reward and the gold answer, if they are known."""
        reward = self.reward if self.problem.is_graded and not self.is_cut else math.nan
        gold = gold_of(self.problem)
        for turn in self.trajectory.transitions:
            action, prompt_tokens = turn.action, len(turn.observation.tokens_T)
            ending = "clock" if self._cuts(turn) else action.stop_reason
            gold_tokens = 0 if gold is None else len(inside(tokenizer, gold))
            num_tokens = len(action.tokens_T)
            yield Answer(action.text, prompt_tokens, num_tokens, ending, reward, gold, gold_tokens)
            reward, gold = math.nan, None

    def expected_tokens(self, is_last: float) -> float:
        """Estimate the tokens with all the room; `is_last` is how often a token is the last."""
        left = (self.most - self.room) * sum(map(self._cuts, self.trajectory.transitions))
        more = -math.expm1(-is_last * left) / is_last if is_last else left
        return self.trajectory.num_tokens + more


async def measured_pace(
    sampler: PopulationSampler, answers: CentreAnswers, new_P: Sequence[EnvGroupBuilder]
) -> Pace:
    """Measure the seconds per token while many answers are sampled at once.

    Prompts are timed on problems that the engine has not read yet; without any, a token of a prompt
    is taken to cost as much as one of an answer.
    """
    rows = [*answers.prompts] * max(1, _ROWS // len(answers.prompts))
    first, num_first = await _timed(sampler, rows, 1)
    whole, num_whole = await _timed(sampler, rows, _TOKENS_OF_PACE)
    if whole > first and num_whole > num_first:
        sampled = (whole - first) / (num_whole - num_first)
    else:
        sampled = whole / num_whole
    if not new_P:
        return Pace(sampled, sampled)
    began = time.perf_counter()
    sampling = chz.replace(sampler.sampling, max_tokens=1)
    groups_P = await sampler.rollout_centre(new_P, sampling, generation=0)
    took = time.perf_counter() - began
    trajectories = [group.trajectories_G_K[0][0] for group in groups_P]
    turns = [turn for t in trajectories if isinstance(t, Trajectory) for turn in t.transitions]
    num_tokens = sum(len(turn.observation.tokens_T) for turn in turns)
    # Each prompt comes with a token of its answer.
    return Pace(max(0.0, took - sampled * len(turns)) / max(1, num_tokens), sampled)


async def _timed(
    sampler: PopulationSampler, observations: Sequence[Observation], room: int
) -> tuple[float, int]:
    """Return seconds and tokens of the centre's answers of at most `room` tokens."""
    params = chz.replace(sampler.sampling, max_tokens=min(room, sampler.sampling.max_tokens))
    num_tokens, began = 0, time.perf_counter()

    async def sample(observation: Observation) -> None:
        nonlocal num_tokens
        action = await sampler.engine.sample(SampleRequest("centre", observation, params))
        num_tokens += len(action.tokens_T)

    async with anyio.create_task_group() as tasks:
        for observation in observations:
            tasks.start_soon(sample, observation)
    return time.perf_counter() - began, num_tokens
