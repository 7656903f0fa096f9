"""Later turns go on from what was kept of earlier ones, with the same answers bit for bit."""

import asyncio
import random
import tracemalloc
from pathlib import Path

import pytest

from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import EngineError
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.rl.types import Action
from tests.engines.torch.reference import request, running_engine
from tests.tiny_models import FIRST_CHARACTER, VOCABULARY, TinyModel

GENOMES_G = [Genome((Term(5 + g // 2, 0.1 * (-1) ** g),)) for g in range(4)]
STEP = Step((Term(9, 0.05),))
TARGETS = (*range(len(GENOMES_G)), "centre", "base")
TURNS = 4
MIB, GIB = 1 << 20, 1 << 30


async def _rollout(engine: TorchEngine, i: int) -> list[Action]:
    """Turns of lengths that `i` draws; prompts begin alike, whoever answers."""
    rng = random.Random(i)
    target = rng.choice(TARGETS)
    prompt = [*range(FIRST_CHARACTER, VOCABULARY)][: rng.choice((1, 8, 9, 30))] + [5] * (i % 3)
    temperature = rng.choice((0.0, 0.9))
    actions: list[Action] = []
    for turn in range(TURNS):
        sampling = {"max_tokens": rng.choice((1, 2, 7, 15)), "temperature": temperature}
        asked = request(target, prompt, seed=10 * i + turn, top_p=rng.choice((1, 0.9)), **sampling)
        actions.append(await engine.sample(asked))
        told = rng.choices(range(FIRST_CHARACTER, VOCABULARY), k=rng.choice((1, 3, 8, 20)))
        kept = rng.choice((0, 0, 0, 1))  # some Envs drop the end of an action
        prompt = [*prompt, *actions[-1].tokens_T[: len(actions[-1].tokens_T) - kept], *told]
    return actions


async def _rollouts(engine: TorchEngine, num: int = 20) -> list[list[Action]]:
    return list(await asyncio.gather(*(_rollout(engine, i) for i in range(num))))


async def _check(path: Path, space: SearchSpaceBuilder) -> None:
    async with running_engine(path, space, prefix_cache_gib=0) as engine:
        await engine.load(GENOMES_G)
        expected = await _rollouts(engine)
        total = engine.stats()["prefilled_tokens"]
        assert engine.stats()["cached_tokens"] == 0
        await engine.apply(STEP)
        await engine.load(GENOMES_G)
        expected_after = await _rollouts(engine)
    assert expected_after != expected
    for options in (
        {"num_lanes": 3, "max_batch_size": 48},
        # Room for a few requests.
        {"num_lanes": 1, "prefill_tokens": 30, "prefix_cache_gib": 60_000 / GIB},
    ):
        async with running_engine(path, space, **options) as engine:
            await engine.load(GENOMES_G)
            assert await _rollouts(engine) == expected, options
            stats = engine.stats()
            assert stats["prefilled_tokens"] + stats["cached_tokens"] == total
            assert stats["cached_tokens"] > (0.02 if "prefix_cache_gib" in options else 0.5) * total
            await engine.apply(STEP)
            await engine.load(GENOMES_G)
            assert await _rollouts(engine) == expected_after, options


@pytest.mark.parametrize(
    ("family", "space"),
    [
        ("qwen2", LowRank(rank=2)),
        ("gemma3", LowRank()),
        ("gpt_neox", FullRank()),
        ("experts", LowRank()),
    ],
)
@pytest.mark.slow
async def test_turns_have_the_same_answers_with_and_without_a_cache(
    tiny_model: TinyModel, family: str, space: SearchSpaceBuilder
) -> None:
    await _check(tiny_model(family), space)


async def test_only_new_tokens_of_a_turn_are_prefilled(tiny_model: TinyModel) -> None:
    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        await engine.load(GENOMES_G)
        first = await engine.sample(request(0, [5] * 20, max_tokens=6))
        prompt = [*[5] * 20, *first.tokens_T, 7, 8, 9]
        await engine.sample(request(0, prompt))
        # The last sampled token was never run.
        assert engine.stats()["prefilled_tokens"] == 20 + 4
        assert engine.stats()["cached_tokens"] == 25
        await engine.sample(request(1, prompt))  # another genome has kept nothing
        assert engine.stats()["cached_tokens"] == 25


@pytest.mark.parametrize(
    "space", [LowRank(), FullRank(), FullRank(exclude=("*embed*", "*.[qk]_proj.*"))]
)
@pytest.mark.slow
async def test_an_engine_that_rests_gives_its_memory_back_and_answers_as_before(
    tiny_model: TinyModel, space: SearchSpaceBuilder
) -> None:
    tracemalloc.start()
    try:
        async with running_engine(tiny_model("qwen2"), space) as engine:
            fingerprint = await engine.apply(STEP)
            await engine.load(GENOMES_G)
            expected = await _rollouts(engine)
            counted = engine.stats()
            taken, _ = tracemalloc.get_traced_memory()
            await engine.rest()
            rested, _ = tracemalloc.get_traced_memory()
            with pytest.raises(EngineError, match="rests: it can be used once its centre is rest"):
                await engine.sample(request(0, [5]))
            assert await engine.restore([STEP]) == fingerprint
            await engine.load(GENOMES_G)
            assert await _rollouts(engine) == expected
            again, _ = tracemalloc.get_traced_memory()
            assert min(taken, again) - rested > MIB
            for name in ("prefilled_tokens", "cached_tokens"):
                assert engine.stats()[name] == 2 * counted[name], name
    finally:
        tracemalloc.stop()


async def test_a_genome_whose_numbers_overflow_changes_nobody_else(tiny_model: TinyModel) -> None:
    broken = Genome((Term(3, 1e38),))
    requests = [request(0, [5] * n, max_tokens=20) for n in (3, 20, 40)]
    async with running_engine(tiny_model("qwen2"), LowRank(), num_lanes=1) as engine:
        await engine.load([GENOMES_G[0], broken])
        before = [await engine.sample(each) for each in requests]
        for _ in range(2):
            wrong = [request(1, [9] * n, max_tokens=30) for n in (1, 30, 60) for _ in range(8)]
            await asyncio.gather(*map(engine.sample, wrong))
            assert [await engine.sample(each) for each in requests] == before
        # And side by side, where its slots are next to them and then theirs.
        found = await asyncio.gather(*map(engine.sample, [*wrong, *requests, *wrong, *requests]))
        assert [*found[24:27], *found[51:]] == before * 2
