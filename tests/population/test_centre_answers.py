"""Answers of the centre within a time: whole ones, or what was said until then."""

import math
import types

import anyio
import pytest

from es_cookbook.engines.base import SampleRequest
from es_cookbook.population.centre_answers import CentreAnswers, centre_answers, seconds_of_reading
from es_cookbook.population.look import Look
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.surrogate import AnswersProblem
from es_cookbook.rl.types import Action, Observation, SamplingParams
from tests.fakes import FakeEngine, problem

pytestmark = pytest.mark.anyio

PROBLEMS = [problem(number, "train") for number in range(4)]


def four(*_: object) -> str:
    return "1234"


class EndlessEngine(FakeEngine):
    """Ends the answers to the first problems, and of the others says so many tokens."""

    def __init__(self, num_ended: int, num_tokens: int) -> None:
        super().__init__(answer=four)
        self.num_ended, self.num_tokens = num_ended, num_tokens

    async def sample(self, request: SampleRequest) -> Action:
        if request.params.max_tokens == 1:  # To warm up.
            return await FakeEngine(answer=four).sample(request)
        if len(self.requests) < self.num_ended:
            return await super().sample(request)
        if self.num_tokens:
            assert request.progress is not None
            request.progress.sampled([16] * self.num_tokens)
            await anyio.sleep_forever()
        return await super().sample(request)


class SilentEngine(FakeEngine):
    """Tells of no answer before it ends; only the first so many end, each after a while."""

    def __init__(self, num_ended: int, seconds: float) -> None:
        super().__init__(answer=four)
        self.num_asked, self.num_ended, self.seconds = 0, num_ended, seconds

    async def sample(self, request: SampleRequest) -> Action:
        self.num_asked += 1
        if self.num_asked > self.num_ended:
            await anyio.sleep_forever()
        await anyio.sleep(self.seconds)
        return await super().sample(request)


def sampler(engine: FakeEngine) -> PopulationSampler:
    return PopulationSampler(engine, sampling=SamplingParams(max_tokens=40))


async def test_answers_that_end_in_time_are_whole() -> None:
    found = await centre_answers(sampler(FakeEngine(answer=four)), PROBLEMS, 60.0)
    assert len(found.answers_P) == 4
    assert found.num_tokens == 4 and found.scale == 1
    assert found.rewards_P is not None and found.rewards_P.shape == (4,)


async def test_answers_without_an_end_are_taken_as_far_as_they_came() -> None:
    found = await centre_answers(sampler(EndlessEngine(0, 5)), PROBLEMS, 0.2)
    assert [sum(sum(a.learned_T) for a in each.answers) for each in found.answers_P] == [5] * 4
    assert found.rewards_P is None
    assert found.num_tokens == 40  # None has ended, so all go on to max_tokens.
    assert found.scale == 8


class SlowlyBegun(FakeEngine):
    """Says two tokens of every answer at once, and some more after a while."""

    async def sample(self, request: SampleRequest) -> Action:
        assert request.progress is not None
        request.progress.sampled([16] * 2)
        await anyio.sleep(0.3)
        request.progress.sampled([16] * 10)
        await anyio.sleep_forever()
        return await super().sample(request)


async def test_answers_of_two_tokens_get_more_time() -> None:
    found = await centre_answers(sampler(SlowlyBegun()), PROBLEMS, 0.2)
    assert found.longest == 10


async def test_how_long_answers_become_follows_from_those_that_have_ended() -> None:
    found = await centre_answers(sampler(EndlessEngine(2, 4)), PROBLEMS, 0.2)
    going_on = 4 + 8 * (1 - math.exp(-36 / 8))  # 2 ends in 16 tokens, and room for 36 more
    assert found.num_tokens == pytest.approx((4 + 4 + 2 * going_on) / 4)
    assert found.longest == 4


async def test_where_nothing_was_said_in_time_answers_are_waited_for() -> None:
    found = await centre_answers(sampler(EndlessEngine(0, 0)), PROBLEMS, 0.0)
    assert found.rewards_P is not None and found.num_tokens == 4


async def test_answers_that_the_engine_is_silent_of_go_on_at_the_pace_of_the_others() -> None:
    found = await centre_answers(sampler(SilentEngine(2, 0.1)), PROBLEMS, 0.4)
    assert len(found.answers_P) == 2 and found.rewards_P is None
    by_now = 16  # in 0.4 s; the others had 4 tokens after 0.1 s
    going_on = by_now + 20 * (1 - math.exp(-24 / 20))  # 2 ends in 40 tokens, and room for 24 more
    assert found.num_tokens == pytest.approx((4 + 4 + 2 * going_on) / 4, rel=0.22)
    assert found.scale == pytest.approx(found.num_tokens / 4)


async def test_nothing_said_in_time_starts_nothing_again() -> None:
    engine = SilentEngine(4, 0.2)
    found = await centre_answers(sampler(engine), PROBLEMS, 0.1)
    assert found.rewards_P is not None and found.num_tokens == 4
    assert engine.num_asked == 4


async def test_the_first_answer_after_the_time_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("es_cookbook.population.centre_answers.SECONDS_BETWEEN_LINES", 0.1)
    with anyio.fail_after(10):
        found = await centre_answers(sampler(SilentEngine(1, 0.2)), PROBLEMS, 0.1)
    assert len(found.answers_P) == 1 and 4 < found.num_tokens <= 40


async def test_shortened_answers_stand_for_whole_ones() -> None:
    whole = await centre_answers(sampler(FakeEngine(answer=four)), PROBLEMS, 60.0)
    short = whole.shortened(2, 1)
    assert [sum(sum(a.learned_T) for a in each.answers) for each in short.answers_P] == [1, 1]
    assert short.scale == 4 and short.num_tokens == whole.num_tokens
    assert short.cost == whole.cost / 2 - 2 * 2 * 3
    assert whole.shortened(9, 99).answers_P == whole.answers_P


def test_of_several_turns_the_first_tokens_are_kept() -> None:
    turns = [
        Example((1, 2, 3), (False, True, True)),
        Example((1, 2, 3, 4, 5), (False, False, False, True, True)),
    ]
    one = AnswersProblem([Example((1, 2), (False, True))])
    found = CentreAnswers([AnswersProblem(turns), one], 2.5, None, 1.0, Look([], None))
    assert found.longest == 4

    def kept(num_tokens: int) -> list[int]:
        return [len(each.tokens_T) for each in found.shortened(1, num_tokens).answers_P[0].answers]

    assert [kept(n) for n in (1, 2, 3, 4, 9)] == [[2], [3], [3, 4], [3, 5], [3, 5]]
    # 3 tokens of one rollout, where 5 were said in 2.
    assert found.shortened(1, 3).scale == pytest.approx(5 / 2 / 3)
    assert found.first(2) == found and found.first(1).seconds == 0.5


async def test_the_pace_of_reading_is_that_of_all_prompts_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter((10.0, 16.0))
    clock = types.SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr("es_cookbook.population.centre_answers.time", clock)
    engine, prompts = FakeEngine(answer=four), [Observation((5, 6)), Observation((7,))]
    seconds = await seconds_of_reading(engine, prompts, SamplingParams(max_tokens=9))
    assert seconds == 6 / 3
    assert [request.params.max_tokens for _, request in engine.requests] == [1, 1]
