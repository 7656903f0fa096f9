"""The centre is measured greedily on held-out problems; what is lost is left out and said."""

import math
from collections.abc import Sequence

import pytest

from es_cookbook.engines.base import SampleRequest
from es_cookbook.errors import TooManyLostError
from es_cookbook.evaluate import evaluate
from es_cookbook.evolution.genome import Genome
from es_cookbook.population_sampler import PopulationSampler
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.types import Observation, SamplingParams
from tests.fakes import FakeEngine

pytestmark = pytest.mark.anyio


class Even(ProblemEnv):
    """Pays for even answers; cannot read words."""

    def grade(self, text: str) -> Grade:
        even = int(text) % 2 == 0
        return Grade(2.0 * even, {"correct": float(even)})


def problems(*tokens: int) -> Sequence[ProblemGroupBuilder]:
    return [
        ProblemGroupBuilder(
            lambda t=t: Even(Observation((t,))), str(t), problem_tags=("small",) * (t < 3)
        )
        for t in tokens
    ]


def sampler(engine: FakeEngine, max_failed_fraction: float = 0.3) -> PopulationSampler:
    warm = SamplingParams(max_tokens=5, temperature=1.0)
    return PopulationSampler(
        engine, sampling=warm, attempts=4, max_failed_fraction=max_failed_fraction
    )


def answer(who: Genome | str, request: SampleRequest) -> str:
    (token,) = request.observation.tokens_T
    return "word" if token == 9 else str(token)


async def test_the_centre_is_measured_greedily_by_tag() -> None:
    engine = FakeEngine(answer=answer)
    metrics = await evaluate(sampler(engine), problems(1, 2, 4, 6))
    assert metrics == {
        "test/reward/mean": 1.5,
        "test/env/all/correct": 0.75,
        "test/env/small/correct": 0.5,
        "test/rollouts/failed": 0.0,
    }
    assert [(who, request.params) for who, request in engine.requests] == [
        ("centre", SamplingParams(max_tokens=5))
    ] * 4


async def test_lost_rollouts_are_left_out_and_counted() -> None:
    metrics = await evaluate(sampler(FakeEngine(answer=answer)), problems(2, 4, 6, 9))
    assert metrics["test/reward/mean"] == 2.0
    assert metrics["test/rollouts/failed"] == 1.0


async def test_too_many_lost_stop_the_run() -> None:
    with pytest.raises(TooManyLostError, match="2 of the 4 rollouts of an evaluation were lost"):
        await evaluate(sampler(FakeEngine(answer=answer)), problems(2, 4, 9, 9))


async def test_when_all_is_lost_the_mean_is_unknown() -> None:
    metrics = await evaluate(sampler(FakeEngine(answer=answer), 1.0), problems(9))
    assert math.isnan(metrics["test/reward/mean"])


async def test_without_problems_nothing_is_measured() -> None:
    assert await evaluate(sampler(FakeEngine()), []) == {}
