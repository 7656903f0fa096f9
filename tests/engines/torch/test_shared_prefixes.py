"""What requests of a genome begin with in common is computed once, and answers keep their bits."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence

import pytest

from es_cookbook import FullRank, LowRank, SamplingParams
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch import host, self_check
from es_cookbook.engines.torch.attention import TokenCache
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from tests.engines.torch.reference import Reference, request, running_engine, sample_all, who
from tests.tiny_models import CONTEXT, FIRST_CHARACTER, VOCABULARY, TinyModel

GENOMES_G = [Genome((Term(5 + g // 2, 0.1 * (-1) ** g),)) for g in range(4)]
TARGETS = (*range(len(GENOMES_G)), "centre", "base")
STEP = Step((Term(9, 0.05),))
GIB = 1 << 30

Request = SampleRequest | LogprobsRequest


def _tokens(rng: random.Random, *lengths: int) -> list[int]:
    return rng.choices(range(FIRST_CHARACTER, VOCABULARY), k=rng.choice(lengths))


def _tree(seed: int, num: int = 60) -> list[Request]:
    """Requests whose prompts are paths in a random tree, as of examples, problems and attempts."""
    rng = random.Random(seed)
    paths: list[list[int]] = [[], _tokens(rng, 1, 15, 16, 40)]
    requests: list[Request] = []
    while len(requests) < num:
        path = rng.choice(paths)
        if len(path) < 90 and rng.random() < 0.4:
            paths.append([*path, *_tokens(rng, 1, 2, 7, 16, 33)])
            continue
        prompt = tuple(path or _tokens(rng, 1, 9))
        target = rng.choice(TARGETS)
        if rng.random() < 0.3:
            continuation = tuple(_tokens(rng, 1, 2, 9))
            requests += [LogprobsRequest(target, prompt, continuation)] * rng.choice((1, 1, 3))
            continue
        sampling = {"max_tokens": rng.choice((1, 2, 9, 20)), "temperature": rng.choice((0.0, 0.9))}
        for attempt in range(rng.choice((1, 1, 4))):
            requests.append(request(target, prompt, seed=attempt, **sampling))
    return requests


async def _answer(engine: TorchEngine, asked: Request) -> object:
    if isinstance(asked, LogprobsRequest):
        return await engine.logprobs(asked)
    return await engine.sample(asked)


async def _answers(engine: TorchEngine, requests: Sequence[Request]) -> dict[Request, object]:
    """Answers to all of them; equal requests have equal ones."""
    found = await asyncio.gather(*(_answer(engine, each) for each in requests))
    answers = dict(zip(requests, found, strict=True))
    assert [answers[each] for each in requests] == found
    return answers


async def _with_cancellations(
    engine: TorchEngine, requests: Sequence[Request], rng: random.Random
) -> dict[Request, object]:
    """Answers to those that are not cancelled, now or while others read what they have."""
    tasks = [asyncio.ensure_future(_answer(engine, each)) for each in requests]
    for i in rng.sample(range(len(tasks)), len(tasks) // 3):
        if rng.random() < 0.3:
            await asyncio.sleep(0.002)
        tasks[i].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    pairs = zip(requests, found, strict=True)
    return {
        each: answer for each, answer in pairs if not isinstance(answer, asyncio.CancelledError)
    }


@pytest.mark.parametrize(
    ("family", "space", "dtype"),
    [
        ("qwen2", LowRank(rank=2), "float32"),
        ("gemma3", LowRank(), "bfloat16"),
        ("gpt_neox", FullRank(), "float32"),
    ],
)
@pytest.mark.slow
async def test_answers_have_the_same_bits_with_and_without_shared_prefixes(
    tiny_model: TinyModel, family: str, space: SearchSpaceBuilder, dtype: str
) -> None:
    path = tiny_model(family)
    trees = [_tree(seed) for seed in (1, 2)]
    async with running_engine(path, space, dtype=dtype, prefix_cache_gib=0) as engine:
        await engine.load(GENOMES_G)
        expected = [await _answers(engine, tree) for tree in trees]
        assert engine.stats()["cached_tokens"] == 0
        await engine.apply(STEP)
        await engine.load(GENOMES_G)
        expected_after = await _answers(engine, trees[0])
    assert expected_after != expected[0]
    rng = random.Random(0)
    for options in (
        {"num_lanes": 3, "max_batch_size": 48},
        # A few blocks for what nobody reads.
        {"num_lanes": 1, "prefill_tokens": 30, "prefix_cache_gib": 20_000 / GIB},
    ):
        async with running_engine(path, space, dtype=dtype, **options) as engine:
            await engine.load(GENOMES_G)
            for tree, answers in zip(trees, expected, strict=True):
                shuffled = rng.sample(tree, len(tree))
                assert await _answers(engine, shuffled) == answers, options
                some = await _with_cancellations(engine, shuffled, rng)
                assert len(some) > len(set(tree)) / 3
                assert all(answers[each] == answer for each, answer in some.items())
            stats = engine.stats()
            assert stats["cached_tokens"] > 0.3 * stats["prefilled_tokens"]
            await engine.apply(STEP)
            await engine.load(GENOMES_G)
            assert await _answers(engine, rng.sample(trees[0], len(trees[0]))) == expected_after


async def test_attempts_at_a_problem_prefill_its_prompt_once(tiny_model: TinyModel) -> None:
    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        await engine.load(GENOMES_G)
        attempts = [request(1, [5] * 40, seed=seed, temperature=1.0) for seed in range(8)]
        assert len(set(await sample_all(engine, attempts))) > 1
        assert engine.stats()["prefilled_tokens"] == 40 + 7, "of each the last token"
        scored = [LogprobsRequest(1, (5,) * 40, (seed, seed)) for seed in range(3)]
        await asyncio.gather(*map(engine.logprobs, scored))
        assert engine.stats()["prefilled_tokens"] == 40 + 7 + 3


async def test_the_centres_prefixes_live_until_it_moves(tiny_model: TinyModel) -> None:
    asked = {target: [request(target, [*[5] * 30, i]) for i in (7, 8)] for target in ("centre", 0)}

    async def prefilled(engine: TorchEngine, target: str | int) -> float:
        before = engine.stats()["prefilled_tokens"]
        await sample_all(engine, asked[target])
        return engine.stats()["prefilled_tokens"] - before

    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        await engine.load(GENOMES_G)
        assert [await prefilled(engine, target) for target in ("centre", 0)] == [32, 32]
        await engine.load(GENOMES_G[1:])
        assert [await prefilled(engine, target) for target in ("centre", 0)] == [2, 32]
        await engine.apply(STEP)
        assert await prefilled(engine, "centre") == 32


async def test_long_prompts_with_a_shared_prefix_take_turns_where_the_cache_is_small(
    tiny_model: TinyModel,
) -> None:
    shared = [7] * (CONTEXT // 2)
    requests = [
        request("centre", [*shared, *[8 + i] * (CONTEXT // 2 - 12 - i % 5)]) for i in range(12)
    ] + [request("centre", [*shared[: 3 * i], 6], max_tokens=30) for i in range(12)]
    path = tiny_model("qwen2")
    async with running_engine(path, LowRank(), prefix_cache_gib=0) as engine:
        expected = await sample_all(engine, requests)
    least = 8 * CONTEXT * 2 * 2 * (8 + 16) * 4 / GIB  # as in test_memory
    for lanes, idle in ((1, 1), (2, 1), (2, 1000)):
        options = {"num_lanes": lanes, "kv_cache_gib": least, "prefix_cache_gib": idle / GIB}
        async with running_engine(path, LowRank(), **options) as engine:
            assert await sample_all(engine, requests) == expected


@pytest.mark.parametrize("idle", [None, 0])
async def test_the_attention_of_gpus_reads_shared_prefixes(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, idle: float | None
) -> None:
    for module in (host, self_check):  # as on a GPU; no kernel takes the place of this model's
        monkeypatch.setattr(module, "new_cache", lambda _device, blocks, _dtype: TokenCache(blocks))
    path = tiny_model("gpt_neox")
    tree = [each for each in _tree(3) if isinstance(each, SampleRequest)]
    greedy = [dataclasses.replace(each, params=SamplingParams(max_tokens=9)) for each in tree]
    scored = [each for each in _tree(3) if isinstance(each, LogprobsRequest)]
    reference = Reference(path, LowRank())
    async with running_engine(path, LowRank(), num_lanes=1, prefix_cache_gib=idle) as engine:
        await engine.load(GENOMES_G)
        for _ in range(2):
            actions = await sample_all(engine, greedy)
            scores = await asyncio.gather(*map(engine.logprobs, scored))
        stats = engine.stats()
        shared = stats["cached_tokens"] / (stats["cached_tokens"] + stats["prefilled_tokens"])
        assert shared > 0.5 if idle is None else shared == 0
    reference.check_targets(GENOMES_G, greedy, actions)
    for asked, found in zip(scored, scores, strict=True):
        reference.become(who(GENOMES_G, asked.target))
        reference.check_logprobs(asked.prompt_T, asked.continuation_T, found)
