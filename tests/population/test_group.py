"""An attempt's policies share its seeds and its clock."""

import pytest

from es_cookbook.common.errors import RequestError
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.population.group import Attempt, EnginePolicy, ResidentBlock
from es_cookbook.rl.timeouts import Clock, Watch
from es_cookbook.rl.types import Observation, SamplingParams
from tests.fakes import FakeEngine

GENOME = Genome((Term(4, 1.0),))
PROMPT = Observation((5,))


async def make(engine: FakeEngine) -> EnginePolicy:
    await engine.load([GENOME])
    block = ResidentBlock(range(6, 7), [0], host=engine)
    sampling = SamplingParams(max_tokens=3)
    clock = Clock(Watch(60))
    return EnginePolicy(Attempt(engine, sampling, block, lambda n: 100 + n, clock), 0)


async def test_each_call_has_the_next_seed_whoever_makes_it() -> None:
    engine = FakeEngine()
    policy = await make(engine)
    other = SamplingParams(max_tokens=9)
    with policy.attempt.clock.running():
        await policy.sample(PROMPT)
        await policy.centre.sample(PROMPT)
        await policy.base.sample(PROMPT, other)
        await policy.centre.base.sample(PROMPT)
    asked = [(who, request.seed, request.params.max_tokens) for who, request in engine.requests]
    assert asked == [(GENOME, 100, 3), ("centre", 101, 3), ("base", 102, 9), ("base", 103, 3)]


async def test_a_genome_that_is_gone_is_refused_and_the_centre_is_not() -> None:
    policy = await make(FakeEngine(capacity=4))
    policy.attempt.block.host = None
    with policy.attempt.clock.running():
        with pytest.raises(RequestError, match=r"genome 6 was asked after .* hosts 4 at a time"):
            await policy.sample(PROMPT)
        with pytest.raises(RequestError, match="genome 6"):
            await policy.logprobs((1,), (2,))
        await policy.centre.sample(PROMPT)
        assert len(await policy.base.logprobs((1,), (2, 3))) == 2
