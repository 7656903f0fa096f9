"""Answers of the centre within a time: whole ones, or as many tokens as fit."""

import math

import pytest

from es_cookbook.engines.base import SampleRequest
from es_cookbook.population import centre_answers as module
from es_cookbook.population.centre_answers import (
    AnswerSample,
    CentreAnswers,
    centre_answers,
    measured_pace,
)
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.surrogate import AnswersProblem
from es_cookbook.rl.types import Action, SamplingParams
from tests.fakes import FakeEngine, problem

PROBLEMS = [problem(number, "train") for number in range(4)]


class ClockedEngine(FakeEngine):
    """Takes seconds per token of a new prompt and of an answer, by its own clock.

    Answers have so many tokens in turn.
    """

    def __init__(self, *lengths: int, prompt: float = 0.0, sampled: float = 0.0) -> None:
        super().__init__(answer=lambda who, request: "1" * 40)
        self.lengths, self.prompt, self.sampled = lengths or (4,), prompt, sampled
        self.now = 0.0
        self.known: dict[tuple[int, ...], int] = {}

    def perf_counter(self) -> float:
        return self.now

    async def sample(self, request: SampleRequest) -> Action:
        prompt_T = request.observation.tokens_T
        if prompt_T not in self.known:
            self.known[prompt_T] = self.lengths[len(self.known) % len(self.lengths)]
            self.now += self.prompt * len(prompt_T)
        length, room = self.known[prompt_T], request.params.max_tokens
        action = await super().sample(request)
        tokens_T = action.tokens_T[: min(length, room)]
        self.now += self.sampled * len(tokens_T)
        ending = "stop" if length <= room else "length"
        logprobs_T = action.logprobs_T and action.logprobs_T[: len(tokens_T)]
        return Action(tokens_T, "1" * len(tokens_T), ending, logprobs_T)


@pytest.fixture
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PopulationSampler:
    """Samples at most 40 tokens from the engine of the test's parameter."""
    monkeypatch.setattr(module, "time", request.param)
    return PopulationSampler(request.param, sampling=SamplingParams(max_tokens=40))


def said(found: CentreAnswers) -> list[int]:
    return [sum(sum(a.learned_T) for a in each.answers) for each in found.answers_P]


@pytest.mark.parametrize("sampler", [ClockedEngine(4)], indirect=True)
async def test_answers_that_end_in_time_are_whole(sampler: PopulationSampler) -> None:
    found = await centre_answers(sampler, PROBLEMS, 60.0)
    assert said(found) == [4] * 4
    assert (found.num_tokens, found.scale) == (4, 1)
    assert {(a.text, a.ending, a.num_tokens) for a in found.sample.answers} == {("1111", "stop", 4)}
    assert len(found.sample.rewards) == found.sample.num_rollouts == 4
    assert {(a.gold, a.gold_tokens) for a in found.sample.answers} == {("ace", 3)}


@pytest.mark.parametrize("sampler", [ClockedEngine(99, sampled=1.0)], indirect=True)
async def test_answers_without_an_end_have_as_many_tokens_as_fit(
    sampler: PopulationSampler,
) -> None:
    # 4 s for a token of all, 32 s for eight, and 84 s are left for 21.
    found = await centre_answers(sampler, PROBLEMS, 120.0)
    assert said(found) == [21] * 4
    assert found.num_tokens == 40 and found.scale == pytest.approx(40 / 21)
    assert {a.ending for a in found.sample.answers} == {"clock"} and not found.sample.rewards
    found = await centre_answers(sampler, PROBLEMS, 0.0)
    assert said(found) == [8] * 4, "fewer say nothing"
    found = await centre_answers(sampler, PROBLEMS, 1e9)
    assert said(found) == [40] * 4
    assert {a.ending for a in found.sample.answers} == {"length"} and len(found.sample.rewards) == 4


@pytest.mark.parametrize("sampler", [ClockedEngine(4, 99, sampled=1.0)], indirect=True)
async def test_how_long_answers_become_follows_from_those_that_have_ended(
    sampler: PopulationSampler,
) -> None:
    found = await centre_answers(sampler, PROBLEMS, 0.0)
    going_on = 8 + 12 * (1 - math.exp(-32 / 12))  # 2 ends in 24 tokens, and room for 32 more
    assert found.num_tokens == pytest.approx((4 + 4 + 2 * going_on) / 4)
    assert [a.ending for a in found.sample.answers] == ["stop", "clock"] * 2
    assert [math.isnan(a.reward) for a in found.sample.answers] == [False, True] * 2


def test_shortened_answers_stand_for_whole_ones() -> None:
    turns = [
        Example((1, 2, 3), (False, True, True)),
        Example((1, 2, 3, 4, 5), (False, False, False, True, True)),
    ]
    one = AnswersProblem([Example((1, 2), (False, True))])
    found = CentreAnswers([], [AnswersProblem(turns), one], 2.5, AnswerSample([]))
    assert found.longest == 4 and found.cost == 8 + 4 + 2 + 1

    def kept(num_tokens: int) -> list[int]:
        return [len(each.tokens_T) for each in found.shortened(1, num_tokens).answers_P[0].answers]

    assert [kept(n) for n in (1, 2, 3, 4, 9)] == [[2], [3], [3, 4], [3, 5], [3, 5]]
    # 3 tokens of one rollout, where 5 were said in 2.
    assert found.shortened(1, 3).scale == pytest.approx(5 / 2 / 3)
    assert found.shortened(9, 99).answers_P == found.answers_P


@pytest.mark.parametrize("sampler", [ClockedEngine(4, 30, prompt=0.1, sampled=1.0)], indirect=True)
async def test_prompts_and_answers_have_a_pace_each(sampler: PopulationSampler) -> None:
    new_P = [problem(number, "train") for number in range(4, 7)]
    answers = await centre_answers(sampler, PROBLEMS, 60.0)
    pace = await measured_pace(sampler, answers, new_P)
    assert pace.sampled == pytest.approx(1.0)
    assert pace.prompt == pytest.approx(0.1)
    assert pace.seconds(20, 8) == pytest.approx(20 * pace.prompt + 8)
    known = await measured_pace(sampler, answers, [])
    assert known.prompt == known.sampled
