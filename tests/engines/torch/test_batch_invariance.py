"""An answer is a function of its request, bit for bit: not of the batch, the lanes or the slots."""

import random
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from es_cookbook import FullRank, LowRank
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch import slots
from es_cookbook.engines.torch.kernels import experts
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from tests.engines.torch.reference import request, running_engine, sample_all, score_all
from tests.families import sampled
from tests.tiny_models import CONTEXT, FIRST_CHARACTER, VOCABULARY, TinyModel, save_with_tokenizer

GENOMES_G = [Genome((Term(5 + g // 2, 0.1 * (-1) ** g),)) for g in range(5)]
TARGETS = (*range(len(GENOMES_G)), "centre", "base")


def _requests() -> list[SampleRequest]:
    """Greedy and hot ones, of lengths that make rows come and go all the time."""
    rng = random.Random(3)
    return [
        request(
            rng.choice(TARGETS),
            rng.choices(range(FIRST_CHARACTER, VOCABULARY), k=rng.choice((1, 2, 7, 8, 9, 17, 40))),
            max_tokens=rng.choice((1, 2, 5, 9, 23, 31)),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_p=rng.choice((1.0, 0.9)),
            seed=i,
        )
        for i in range(60)
    ]


@pytest.mark.parametrize(
    ("family", "space", "dtype"),
    sampled(
        [
            ("qwen2", LowRank(), "float32"),
            ("llama", LowRank(rank=3), "float32"),
            ("gemma3", LowRank(), "float32"),
            ("gpt_neox", LowRank(), "float32"),
            ("qwen3", FullRank(), "float32"),
            ("qwen2", LowRank(), "bfloat16"),
            ("gemma3", LowRank(rank=3), "bfloat16"),
            ("gpt_neox", FullRank(), "bfloat16"),
            ("qwen2", LowRank(), "bfloat16 in float32"),
            ("gemma3", LowRank(rank=3), "float16"),
            ("gpt_neox", FullRank(), "bfloat16 in float32"),
            ("experts", LowRank(), "float32"),
            ("experts", LowRank(rank=3), "float32"),
            ("experts", LowRank(), "bfloat16"),
            ("experts", LowRank(), "bfloat16 in float32"),
        ],
        7,
    ),
)
@pytest.mark.slow
async def test_actions_and_their_logprobs_do_not_depend_on_the_batch(
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    space: SearchSpaceBuilder,
    dtype: str,
) -> None:
    monkeypatch.setattr(experts, "ELEMENTS_AT_ONCE", 1000)  # a few rows of experts at once
    path = tiny_model(family)
    dtype, _, products = dtype.partition(" in ")
    of_dtype = {"dtype": dtype, "products": products or "auto"}
    requests = _requests()
    shuffled = requests.copy()
    random.Random(4).shuffle(shuffled)
    async with running_engine(path, space, **of_dtype) as engine:
        await engine.load(GENOMES_G)
        expected = dict(zip(requests, await sample_all(engine, requests), strict=True))
        assert dict(zip(shuffled, await sample_all(engine, shuffled), strict=True)) == expected
        half = shuffled[::2]
        assert await sample_all(engine, half) == [expected[r] for r in half]
        for alone in shuffled[:12]:
            assert await engine.sample(alone) == expected[alone]
    for options in (
        {"num_lanes": 1, "max_batch_size": 16},
        {"num_lanes": 1, "prefill_tokens": 20},
        {"num_lanes": 3, "max_batch_size": 100},
    ):
        async with running_engine(path, space, **of_dtype, **options) as engine:
            await engine.load(GENOMES_G)
            actions = dict(zip(shuffled, await sample_all(engine, shuffled), strict=True))
            assert actions == expected, options


@pytest.mark.parametrize("rank", [1, 3, 4, 16])
async def test_an_answer_does_not_depend_on_its_place_in_the_batch(
    tmp_path: Path, rank: int
) -> None:
    # 43 outputs: rows of a matmul that begin at every alignment there is.
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=43, max_position_embeddings=CONTEXT, **sizes, **heads)
    save_with_tokenizer(LlamaForCausalLM(config), tmp_path / "model")
    others = [request(g, [7] * n, max_tokens=n) for n in range(1, 9) for g in (0, 2)]
    same = [request(1, [5, 6, 7], max_tokens=12)] * 30
    async with running_engine(tmp_path / "model", LowRank(rank=rank), num_lanes=1) as engine:
        await engine.load(GENOMES_G)
        answers = await sample_all(engine, [*same[:5], *others, *same[5:]])
    found = set(answers[:5] + answers[5 + len(others) :])
    assert len(found) == 1, found


async def test_scores_do_not_depend_on_the_batch(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    requests = [
        LogprobsRequest(
            rng.choice(TARGETS),
            tuple(rng.choices(range(VOCABULARY), k=rng.choice((1, 4, 8, 15)))),
            tuple(rng.choices(range(VOCABULARY), k=rng.choice((1, 2, 9, 24)))),
        )
        for _ in range(40)
    ]
    scores: list[list[list[float]]] = []
    cases = {"num_lanes": 1}, {"num_lanes": 3, "prefill_tokens": 30}, {"num_lanes": 2}
    for options, scored_bytes in zip(cases, (1 << 27, 1 << 27, 1), strict=True):
        monkeypatch.setattr(slots, "SCORED_BYTES", scored_bytes)  # 1: so few that some are cut
        async with running_engine(tiny_model("llama"), LowRank(), **options) as engine:
            await engine.load(GENOMES_G)
            scores.append(await score_all(engine, requests))
            scores.append([await engine.logprobs(r) for r in requests[:10]] + scores[0][10:])
    assert all(s == scores[0] for s in scores)
