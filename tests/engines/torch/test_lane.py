"""Requests come and go while others run, and each still gets the answer it would get alone."""

import asyncio
import random
import threading

import pytest

from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import EngineError
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.engines.torch.population_layers import PopulationModel
from es_cookbook.evolution.genome import Genome, Term
from tests.engines.torch.reference import (
    Reference,
    request,
    running_engine,
    sample_all,
    wait_until_sampling,
)
from tests.tiny_models import CONTEXT, FIRST_CHARACTER, VOCABULARY, TinyModel

GENOMES_G = [Genome((Term(5 + g // 2, 0.1 * (-1) ** g),)) for g in range(5)]
SMALL = {"num_lanes": 1, "max_batch_size": 16}
"""One lane of two blocks of slots."""


async def test_more_requests_than_slots_of_very_different_lengths_are_all_served(
    tiny_model: TinyModel,
) -> None:
    rng = random.Random(6)
    requests = [
        request(
            rng.randrange(5),
            rng.choices(range(FIRST_CHARACTER, VOCABULARY), k=rng.randrange(1, 30)),
            max_tokens=rng.choice((1, 2, 3, 40)),
        )
        for _ in range(70)
    ]
    reference = Reference(tiny_model("qwen2"), LowRank())
    async with running_engine(tiny_model("qwen2"), LowRank(), **SMALL) as engine:
        await engine.load(GENOMES_G)
        actions = await sample_all(engine, requests)
        stats = engine.stats()
        assert stats["requests"] == 70
        assert stats["tokens"] == sum(len(action.tokens_T) for action in actions)
        prompts = sum(len(request.observation.tokens_T) for request in requests)
        assert stats["prefilled_tokens"] + stats["cached_tokens"] == prompts
    reference.check_targets(GENOMES_G, requests, actions)


async def test_models_that_wait_for_one_lane_are_all_served(tiny_model: TinyModel) -> None:
    requests = [
        request(target, [3 + i, 9], max_tokens=3)
        for i in range(30)
        for target in (0, 1, 2, "centre", "base")
    ]
    scored = LogprobsRequest(1, (4, 5), (6, 7))
    reference = Reference(tiny_model("qwen2"), FullRank())
    async with running_engine(tiny_model("qwen2"), FullRank(), **SMALL) as engine:
        await engine.load(GENOMES_G[:3])
        scoring = asyncio.ensure_future(engine.logprobs(scored))
        actions = await sample_all(engine, requests)
        scores = await scoring
    reference.check_targets(GENOMES_G, requests, actions)
    reference.become(GENOMES_G[1])
    reference.check_logprobs(scored.prompt_T, scored.continuation_T, scores)


async def test_a_cancelled_request_frees_its_slot_and_leaves_the_others_alone(
    tiny_model: TinyModel,
) -> None:
    async with running_engine(tiny_model("qwen2"), LowRank(), **SMALL) as engine:
        requests = [request("centre", [4 + i], max_tokens=100) for i in range(15)]
        expected = await sample_all(engine, requests)
        before = engine.stats()["tokens"]
        cancelled = [
            asyncio.ensure_future(engine.sample(request("centre", [3], max_tokens=CONTEXT - 1)))
            for _ in range(20)  # More than there are slots: some run, some wait.
        ]
        await wait_until_sampling(engine)
        for task in cancelled:
            task.cancel()
        assert await sample_all(engine, requests) == expected
        assert all(task.cancelled() for task in cancelled)
        spent = engine.stats()["tokens"] - before - sum(len(a.tokens_T) for a in expected)
        assert spent < 20 * (CONTEXT - 1) / 2, "cancelled requests were run to their end"


async def test_a_lane_that_raises_while_decoding_fails_only_its_own_requests(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PopulationModel.forward
    calls = 0

    def fail_at_third(self: PopulationModel, *args: object, **inputs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of ink\nand a page of advice")
        return forward(self, *args, **inputs)

    async with running_engine(tiny_model("qwen2"), LowRank(), **SMALL) as engine:
        requests = [request("centre", [4 + i % 30], max_tokens=10) for i in range(40)]
        expected = await sample_all(engine, requests)
        monkeypatch.setattr(PopulationModel, "forward", fail_at_third)
        results = await asyncio.gather(*map(engine.sample, requests), return_exceptions=True)
    failed = [r for r in results if isinstance(r, BaseException)]
    assert 1 <= len(failed) <= 16
    assert all(isinstance(r, EngineError) and str(r).endswith("out of ink") for r in failed)
    assert all(r == e for r, e in zip(results, expected, strict=True) if r not in failed)


async def test_closing_fails_requests_in_flight_and_ends_the_threads(tiny_model: TinyModel) -> None:
    before = set(threading.enumerate())
    async with running_engine(tiny_model("qwen2"), LowRank(), **SMALL) as engine:
        assert {t.name for t in set(threading.enumerate()) - before} >= {"lane-0"}
        tasks = [
            asyncio.ensure_future(engine.sample(request("centre", [3], max_tokens=CONTEXT - 1)))
            for _ in range(40)
        ]
        await wait_until_sampling(engine)
        unsent = asyncio.ensure_future(engine.sample(request("centre", [3])))
        cancelled = tasks.pop()
        cancelled.cancel()
        await engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineError) and "closed" in str(r) for r in results)
        with pytest.raises(EngineError, match="closed"):
            await unsent
        await engine.close()
        for use in (
            engine.sample(request("centre", [3])),
            engine.logprobs(LogprobsRequest("base", (3,), (4,))),
            engine.load(GENOMES_G),
            engine.restore([]),
        ):
            with pytest.raises(EngineError, match="closed"):
                await use
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("lane-")]
