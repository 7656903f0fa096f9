"""Models that run by their own forward answer as each genome's merged weights would."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.causal_lms import VOCABULARY, build
from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import EngineError
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch import own
from es_cookbook.engines.torch.population_layers import PopulationModel
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from tests.engines.torch.reference import (
    Reference,
    request,
    running_engine,
    sample_all,
    score_all,
    wait_until_sampling,
    who,
)
from tests.tiny_models import character_tokenizer

GENOMES_G = [Genome((Term(5 + g // 2, 0.05 * (-1) ** g),)) for g in range(3)]
STEP = Step((Term(21, 0.03),))
HYBRID = "Lfm2ForCausalLM"
SMALL = {"num_lanes": 1, "max_batch_size": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, by class."""
    folder = tmp_path_factory.mktemp("own")
    # Everything in its cache; some state in its modules; no logits_to_keep.
    for name in (HYBRID, "RecurrentGemmaForCausalLM", "WhisperForCausalLM"):
        build(name).save_pretrained(folder / name)
        character_tokenizer(VOCABULARY).save_pretrained(folder / name)
    return folder


def _requests(number: int, max_tokens: Sequence[int] = (1, 2, 9)) -> list[SampleRequest]:
    """Of every target, with prompts of one token and of more, on several numbers of tokens."""
    rng = random.Random(number)
    return [
        request(
            rng.choice((0, 1, 2, "centre", "base")),
            rng.choices(range(3, VOCABULARY), k=rng.choice((1, 1, 2, 7, 20))),
            max_tokens=rng.choice(max_tokens),
        )
        for _ in range(number)
    ]


async def _check(
    path: Path, space: SearchSpaceBuilder, requests: Sequence[SampleRequest], **options: object
) -> None:
    """Every answer to requests, and the score of it, is the merged model's."""
    reference = Reference(path, space)
    async with running_engine(path, space, **options) as engine:
        assert await engine.apply(STEP) == reference.centre.apply(STEP)
        await engine.load(GENOMES_G)
        actions = await sample_all(engine, requests)
        scored = [LogprobsRequest(r.target, r.observation.tokens_T, (7, 9)) for r in requests]
        scores = await score_all(engine, scored)
    reference.check_targets(GENOMES_G, requests, actions)
    for score, logprobs in zip(scored, scores, strict=True):
        reference.become(who(GENOMES_G, score.target))
        reference.check_logprobs(score.prompt_T, score.continuation_T, logprobs)


@pytest.mark.daily
@pytest.mark.parametrize(
    "space",
    [
        LowRank(rank=2),
        FullRank(sigma_patterns=("*",), sigma_factors=(0.2,)),
        Adapter(targets=("q_proj", "in_proj", "w1")),
    ],
    ids=lambda space: type(space).__name__,
)
async def test_a_hybrid_serves_more_requests_than_slots_of_every_target(
    models: Path, space: SearchSpaceBuilder
) -> None:
    await _check(models / HYBRID, space, _requests(50), **SMALL)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward pass."""
    forward = PopulationModel.forward
    sizes: list[int] = []

    def noting(self: PopulationModel, *args: object, **inputs: torch.Tensor) -> object:
        sizes.append(inputs["input_ids"].numel())
        return forward(self, *args, **inputs)

    monkeypatch.setattr(PopulationModel, "forward", noting)
    return sizes


async def test_long_prompts_run_a_few_rows_at_a_time(models: Path, sizes: list[int]) -> None:
    requests = [request(i % 3, [5 + i] * (80 - i % 2), max_tokens=4) for i in range(24)]
    await _check(models / HYBRID, LowRank(), requests, prefill_tokens=330, **SMALL)
    assert 4 * 80 <= max(sizes) <= 330, "more than the self-check's"


@pytest.mark.slow
async def test_lanes_do_not_meet_in_a_model_that_keeps_state_in_its_modules(models: Path) -> None:
    requests = [request(i % 3, [3 + i] * (3 + i % 2), max_tokens=9) for i in range(60)]
    options = {"num_lanes": 3, "max_batch_size": 48}
    await _check(models / "RecurrentGemmaForCausalLM", LowRank(), requests, **options)


async def test_a_model_that_gives_all_logits_is_read_at_the_end(models: Path) -> None:
    await _check(models / "WhisperForCausalLM", LowRank(), _requests(30), **SMALL)


async def test_cancelled_requests_leave_a_cohort_and_scores_come_while_it_decodes(
    models: Path,
) -> None:
    path = models / HYBRID
    reference = Reference(path, LowRank())
    scored = LogprobsRequest(1, (4, 5), (6, 7))
    async with running_engine(path, LowRank(), **SMALL) as engine:
        await engine.load(GENOMES_G)
        requests = [request(i % 3, [4 + i], max_tokens=60) for i in range(30)]
        tasks = [asyncio.ensure_future(engine.sample(r)) for r in requests]
        await wait_until_sampling(engine)
        for task in tasks[::2]:  # of those that decode, and of those that wait
            task.cancel()
        scores = await engine.logprobs(scored)
        actions = await asyncio.gather(*tasks[1::2])
    reference.check_targets(GENOMES_G, requests[1::2], actions)
    reference.become(GENOMES_G[1])
    reference.check_logprobs(scored.prompt_T, scored.continuation_T, scores)


async def test_a_cohort_may_end_at_its_first_tokens(models: Path) -> None:
    await _check(models / HYBRID, LowRank(), _requests(40, max_tokens=(1,)), **SMALL)


async def test_a_failure_before_requests_are_taken_fails_waiting_requests_and_not_the_lane(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(models / HYBRID, LowRank(), **SMALL) as engine:

        def out_of_memory(self: own.OwnForward, model: PopulationModel) -> None:
            raise MemoryError("no room for modules")

        with monkeypatch.context() as patch:
            patch.setattr(own.OwnForward, "turn_to", out_of_memory)
            with pytest.raises(EngineError, match="no room for modules"):
                await engine.sample(request("centre", [5, 6]))
            with pytest.raises(EngineError, match="no room for modules"):
                await engine.logprobs(LogprobsRequest("centre", (5,), (6,)))
        assert len((await engine.sample(request("centre", [5, 6]))).tokens_T) == 12
