"""What a centre's first answers show: their pace, and how they end."""

import itertools
import math

import pytest

from es_cookbook.engines.base import SampleRequest
from es_cookbook.population.centre_answers import centre_answers
from es_cookbook.population.look import Heard, look_at, pace_of
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.types import Observation, SamplingParams
from tests.fakes import FakeEngine, problem
from tests.population.test_centre_answers import EndlessEngine, four

pytestmark = pytest.mark.anyio

_NUMBERS = itertools.count()
PROBLEMS = [problem(number, "train") for number in range(8)]


def heard(times: list[float], prompt_tokens: int = 10, *, is_over: bool = False) -> Heard:
    """An answer that was begun at 0 and got a token at each of these times."""
    prompt_T = (next(_NUMBERS),) * prompt_tokens
    request = SampleRequest("centre", Observation(prompt_T), SamplingParams())
    one = Heard(request)
    one.began, one.tokens_T, one.is_over = 0.0, (1,) * len(times), is_over
    one.told_at = [(at, number + 1) for number, at in enumerate(times)]
    return one


def test_prompts_and_answers_have_a_pace_each() -> None:
    # 4 prompts of 10 tokens take 2 s, and then every step of 4 tokens half a second.
    answers = [heard([2.0, 2.5, 3.0, 3.5, 4.0]) for _ in range(4)]
    pace = pace_of(answers)
    assert pace is not None
    assert pace.sampled == pytest.approx(0.5 / 4)
    assert pace.prompt == pytest.approx(2.0 / 40)
    assert pace.seconds(20, 8) == pytest.approx(1.0 + 1.0)


def test_a_prompt_that_is_asked_often_is_read_once() -> None:
    # 2 prompts of 10 tokens take 1 s; 8 answers have their first tokens 0.8 s later, and go on.
    answers = [heard([1.8, 2.8, 3.8]) for _ in range(8)]
    for number, answer in enumerate(answers):
        answer.prompt_T = answers[number % 2].prompt_T
    pace = pace_of(answers)
    assert pace is not None
    assert pace.sampled == pytest.approx(1.0 / 8)
    assert pace.prompt == pytest.approx((1.8 - 6 / 8) / 20)


def test_the_pace_is_taken_while_few_answers_have_ended() -> None:
    short = [heard([1.0, 1.1, 1.2, 1.3], is_over=True) for _ in range(2)]
    # The last two go on at a tenth of a token's time each, which is slower for each token.
    long = [heard([1.0, 1.1, 1.2, 1.3, *(1.4 + 0.1 * n for n in range(20))]) for _ in range(2)]
    pace = pace_of([*short, *long])
    assert pace is not None and pace.sampled == pytest.approx(0.1 / 4)


def test_of_answers_that_are_told_of_in_the_end_alone_there_is_one_pace() -> None:
    answers = [heard([4.0], is_over=True) for _ in range(4)]
    for answer in answers:
        answer.tokens_T, answer.told_at = (1,) * 8, [(4.0, 8)]
    pace = pace_of(answers)
    assert pace is not None
    assert (pace.prompt, pace.sampled) == (0.0, pytest.approx(4.0 / 32))
    assert pace_of([heard([])]) is None


def test_prompts_count_as_read_when_nine_tenths_of_the_answers_have_begun() -> None:
    answers = [heard([1.0, 3.0, 4.0]) for _ in range(9)] + [heard([2.0, 3.0, 4.0])]
    pace = pace_of(answers)
    assert pace is not None
    # From 2.0 to 4.0 20 tokens were sampled; before, 10 came with 10 prompts of 10 tokens.
    assert (pace.prompt, pace.sampled) == (pytest.approx(2 / 100), pytest.approx(2 / 20))


def test_the_pace_is_taken_until_more_than_a_quarter_of_the_answers_have_ended() -> None:
    ends = [heard([1.0 + n for n in range(k)], is_over=True) for k in (2, 3, 4)]
    pace = pace_of([*ends, *(heard([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) for _ in range(5))])
    assert pace is not None
    assert pace.sampled == pytest.approx(3 / (1 + 2 + 3 + 5 * 3)), "until 4.0, the third to end"


def test_a_pace_needs_a_tenth_of_a_second() -> None:
    pace = pace_of([heard([1.0, 1.02, 1.04, 1.06, 1.08]) for _ in range(2)])
    assert pace is not None
    assert (pace.prompt, pace.sampled) == (0.0, pytest.approx(1.08 / 10))


async def test_answers_have_rewards_golds_and_ends() -> None:
    sampler = PopulationSampler(FakeEngine(answer=four), sampling=SamplingParams(max_tokens=40))
    look = (await centre_answers(sampler, PROBLEMS, 60.0)).look
    assert [answer.text for answer in look.answers] == ["1234"] * 8
    assert {answer.ending for answer in look.answers} == {"stop"}
    assert all(answer.num_tokens == 4 and answer.prompt_tokens for answer in look.answers)
    assert len(look.rewards) == 8 and look.num_rollouts == 8
    assert {(answer.gold, answer.gold_tokens) for answer in look.answers} == {("ace", 3)}
    assert look_at([], [], {}, FakeEngine().tokenizer).num_rollouts == 1


async def test_what_the_clock_cut_has_no_reward() -> None:
    sampler = PopulationSampler(EndlessEngine(2, 5), sampling=SamplingParams(max_tokens=40))
    look = (await centre_answers(sampler, PROBLEMS, 0.2)).look
    assert [answer.ending for answer in look.answers] == ["stop"] * 2 + ["clock"] * 6
    assert [math.isnan(answer.reward) for answer in look.answers] == [False] * 2 + [True] * 6
    assert [len(answer.text) > 0 for answer in look.answers] == [True] * 8


async def test_answers_for_the_pace_alone_are_cut_once_they_have_shown_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "es_cookbook.population.centre_answers"
    monkeypatch.setattr(f"{module}._SECONDS_OF_PACE", 0.05)

    # The first three end at once, the others never.
    sampler = PopulationSampler(EndlessEngine(3, 5), sampling=SamplingParams(max_tokens=40))
    found = await centre_answers(sampler, PROBLEMS, 60.0, num_kept=3)
    assert found.rewards_P is not None and len(found.rewards_P) == 3
    assert len(found.answers_P) == 3 and found.num_tokens == 4
    assert len(found.look.answers) == found.look.num_rollouts == 3
    assert len(found.look.rewards) == 3


async def test_the_same_problems_may_be_asked_for_the_pace() -> None:
    # The engine has answered once before the clock runs.
    engine = FakeEngine(answer=four)
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=40))
    found = await centre_answers(sampler, PROBLEMS[:3] * 5, 60.0, num_kept=3)
    alone = await centre_answers(sampler, PROBLEMS[:3], 60.0)
    assert found.look.answers == alone.look.answers
    assert engine.stats()["requests"] == 16 + 3


async def test_the_first_answers_of_many_are_those_of_few() -> None:
    sampler = PopulationSampler(FakeEngine(answer=four), sampling=SamplingParams(max_tokens=40))
    many = await centre_answers(sampler, PROBLEMS, 60.0)
    few = await centre_answers(sampler, PROBLEMS[:3], 60.0)
    first = many.first(3)
    assert first.answers_P == few.answers_P
    assert first.rewards_P is not None and few.rewards_P is not None
    assert first.rewards_P.tolist() == few.rewards_P.tolist()
    assert first.seconds == pytest.approx(many.seconds * 3 / 8)
