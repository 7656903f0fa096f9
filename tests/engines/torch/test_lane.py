"""Requests come and go while others run, and each still gets the answer it would get alone."""

import asyncio
import itertools
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from es_cookbook.common.errors import EngineError
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.engines.torch.forward import population_layers, slots
from es_cookbook.engines.torch.forward.population_layers import PopulationModel
from es_cookbook.engines.torch.kernels.products import multiply
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import (
    Reference,
    request,
    running_engine,
    sample_all,
    score_all,
    wait_until_sampling,
)
from tests.tiny_models import BOS, CONTEXT, EOS, FIRST_CHARACTER, PAD, VOCABULARY, TinyModel

pytestmark = pytest.mark.anyio

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


async def test_a_lane_that_raises_while_decoding_fails_only_what_it_had(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PopulationModel.forward
    calls = 0

    def fail_at_third(self: PopulationModel, *args: object, **inputs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of ink")
        return forward(self, *args, **inputs)

    async with running_engine(tiny_model("qwen2"), LowRank(), **SMALL) as engine:
        requests = [request("centre", [4 + i % 30], max_tokens=10) for i in range(40)]
        expected = await sample_all(engine, requests)
        monkeypatch.setattr(PopulationModel, "forward", fail_at_third)
        results = await asyncio.gather(*map(engine.sample, requests), return_exceptions=True)
    failed = [r for r in results if isinstance(r, BaseException)]
    assert 1 <= len(failed) <= 16
    assert all(isinstance(r, EngineError) and "out of ink" in str(r) for r in failed)
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


def byte_tokenizer(pair: tuple[int, int]) -> PreTrainedTokenizerFast:
    """One token a byte: a space and a newline, those of this pair, which are an é, and letters."""
    pieces = {token: chr(ord("A") + token) for token in range(FIRST_CHARACTER, VOCABULARY)}
    others = [token for token in pieces if token not in pair]
    pieces |= {others[0]: "Ġ", others[1]: "Ċ", pair[0]: "Ã", pair[1]: "©"}
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
    vocabulary |= {piece: token for token, piece in pieces.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


async def test_an_action_ends_where_its_text_first_has_the_stop_text(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Also where a token alone is no character, or decoded alone is nothing."""
    hot = {"max_tokens": 40, "temperature": 2.0}
    requests = [request("base", [FIRST_CHARACTER + i % 5], seed=i, **hot) for i in range(60)]
    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        free = await sample_all(engine, requests)
    pairs = Counter(pair for action in free for pair in itertools.pairwise(action.tokens_T))
    often = next(p for p, _ in pairs.most_common() if p[0] != p[1] and min(p) >= FIRST_CHARACTER)
    tokenizer = byte_tokenizer(often)
    shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    async with running_engine(tmp_path / "model", LowRank()) as engine:
        for stop in ("é", "\n", " "):
            asked = [
                request("base", r.observation.tokens_T, seed=r.seed, stop=(stop,), **hot)
                for r in requests
            ]
            num_stopped = 0
            for action, found in zip(free, await sample_all(engine, asked), strict=True):
                starts = [action.tokens_T[: n + 1] for n in range(len(action.tokens_T))]
                texts = [
                    str(tokenizer.decode(list(start), skip_special_tokens=True)) for start in starts
                ]
                end = next((n + 1 for n, text in enumerate(texts) if stop in text), len(texts))
                assert found.tokens_T == action.tokens_T[:end]
                num_stopped += end < len(texts)
            assert num_stopped > 2


@pytest.fixture
def logit_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of logits of every forward pass."""
    forward = PopulationModel.forward
    rows: list[int] = []

    def noting(self: PopulationModel, *args: object, **inputs: torch.Tensor) -> object:
        output = forward(self, *args, **inputs)
        rows.append(output.logits.shape[:-1].numel())
        return output

    monkeypatch.setattr(PopulationModel, "forward", noting)
    return rows


async def test_logits_are_made_of_running_requests_alone(
    tiny_model: TinyModel, logit_rows: list[int]
) -> None:
    requests = [request(g, [5 + g], max_tokens=4 + g) for g in range(5)]  # a block of 8 for each
    async with running_engine(tiny_model("qwen2"), LowRank(), num_lanes=1) as engine:
        await engine.load(GENOMES_G)
        logit_rows.clear()
        await sample_all(engine, requests)
    assert logit_rows == [5, 5, 5, 5, 4, 3, 2, 2], "one row has a copy of itself beside it"


async def test_one_request_is_multiplied_alone(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights: list[int | None] = []

    def noting(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, live: int | None
    ) -> torch.Tensor:
        heights.append(live)
        return multiply(x, weight, bias, live)

    async with running_engine(tiny_model("qwen2"), LowRank(), num_lanes=1) as engine:
        await engine.load(GENOMES_G)
        monkeypatch.setattr(population_layers, "multiply", noting)
        await engine.sample(request(0, [5], max_tokens=4))
    of_prompt = heights.index(1)
    assert set(heights[:of_prompt]) == {None} and set(heights[of_prompt:]) == {1}


async def test_scores_make_as_many_logits_at_a_time_as_their_memory_allows(
    tiny_model: TinyModel, logit_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "SCORED_BYTES", 20 * 4 * VOCABULARY)
    scored = [LogprobsRequest(g, (5, 6), (7,) * 30) for g in range(2)]
    async with running_engine(tiny_model("qwen2"), LowRank(), num_lanes=1) as engine:
        await engine.load(GENOMES_G)
        logit_rows.clear()
        await score_all(engine, scored)
    assert logit_rows == [20, 20, 20]
