"""Products in int8: near those in float32, of a request's own, and no part of steps."""

from pathlib import Path
from typing import cast

import pytest
import torch
from numba.core import config
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.engines.torch.kernels.products import multiplies_int8
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import request, running_engine, sample_all, score_all
from tests.tiny_models import CONTEXT, VOCABULARY, save_with_tokenizer

pytestmark = pytest.mark.skipif(not multiplies_int8(), reason="the processor cannot do it")

INT8 = {"dtype": "auto", "products": "int8"}
PROMPTS = [(5, 6, 7), (8, 9), (5, 6, 7, 10, 11, 12, 13), (30,)]
GENOMES_G = [Genome((Term(7, 0.02),)), Genome((Term(7, -0.02),)), Genome((Term(8, 0.02),))]
STEPS = [Step((Term(1, 0.05), Term(2, -1e-4))), Step((Term(3, 0.01),), decay=0.1)]
ANSWER = (5, 9, 7, 8, 6, 11)


def wide_model(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """With layers of which products are in int8."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
        )
    )
    cast(torch.nn.Module, model).to(dtype)
    save_with_tokenizer(model, path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return wide_model(tmp_path / "model")


@pytest.mark.daily
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
async def test_answers_are_near_those_of_products_in_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    path = wide_model(tmp_path / "model", dtype)
    found: list[torch.Tensor] = []
    for products in ("float32", "int8"):
        async with running_engine(path, LowRank(), dtype="auto", products=products) as engine:
            await engine.load(GENOMES_G)
            asked = [LogprobsRequest(who, p, ANSWER) for who in (0, 1, "centre") for p in PROMPTS]
            found.append(torch.tensor(await score_all(engine, asked)))
    difference = (found[1] - found[0]).abs()
    assert 0 < difference.mean() < 0.15
    # What a genome changes is of the same size: it is not rounded away.
    of_genome = [(each[:4] - each[4:8]).flatten() for each in found]
    assert torch.corrcoef(torch.stack(of_genome))[0, 1] > 0.98


async def test_an_answer_is_the_same_alone_and_among_others(model: Path) -> None:
    async with running_engine(model, LowRank(), **INT8) as engine:
        await engine.load(GENOMES_G)
        asked = [request(who, p) for who in (0, 1, 2, "centre") for p in PROMPTS]
        together = await sample_all(engine, asked)
        alone = [(await sample_all(engine, [each]))[0] for each in asked]
    assert [a.tokens_T for a in alone] == [a.tokens_T for a in together]
    assert [a.logprobs_T for a in alone] == [a.logprobs_T for a in together]


async def test_steps_are_exact_and_the_moved_weights_are_rounded_again(
    model: Path, tmp_path: Path
) -> None:
    scores = [LogprobsRequest("centre", (5, 6, 7), ANSWER)]
    fingerprints: list[list[int]] = []
    for products in ("float32", "int8"):
        async with running_engine(model, LowRank(), dtype="auto", products=products) as engine:
            before = await score_all(engine, scores)
            fingerprints.append([await engine.apply(step) for step in STEPS])
            moved = await score_all(engine, scores)
            assert moved != before
            await engine.save(tmp_path / products)
            await engine.restore([])
            assert await score_all(engine, scores) == before
            assert await engine.restore(STEPS) == fingerprints[-1][-1]
            assert await score_all(engine, scores) == moved
    assert fingerprints[0] == fingerprints[1]
    saved = [load_file(tmp_path / each / "model.safetensors") for each in ("float32", "int8")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


async def test_a_processor_without_the_instruction_refuses(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,-avx512vnni,-avxvnni")
    with pytest.raises(ConfigError, match="takes a processor with AVX512_VNNI or AVX-VNNI"):
        async with running_engine(model, LowRank(), **INT8):
            pass
