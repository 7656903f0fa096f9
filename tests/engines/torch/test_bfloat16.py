"""Sampling with 16-bit weights over the float32 centre: near what float32 says of the same."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import Reference, request, running_engine, score_all, who
from tests.families import sampled
from tests.tiny_models import TinyModel, save_with_tokenizer

GENOMES_G = [Genome((Term(7, 0.1),)), Genome((Term(7, -0.1),))]
STEPS = [Step((Term(1, 0.05),)), Step((Term(2, -0.05), Term(3, 1e-6)))]
CONTINUATION = (5, 9, 7, 8, 6, 11)
CLOSE = {
    ("bfloat16", "bfloat16"): 0.06,
    ("bfloat16", "float32"): 0.02,
    ("float16", "float32"): 3e-3,
}
"""Rounding of activations: everywhere; of keys and values; nowhere. A genome of the wrong sign or
scale is off by far more."""


def rounded_reference(path: Path, space: SearchSpaceBuilder, dtype: str = "bfloat16") -> Reference:
    """In float32, of the weights as this dtype holds them."""
    reference, rounded = Reference(path, space), getattr(torch, dtype)
    reference.base = {n: w.to(rounded).float() for n, w in reference.base.items()}
    reference.centre = Centre(reference.base, reference.space)
    return reference


async def check(path: Path, space: SearchSpaceBuilder, dtypes: tuple[str, str]) -> None:
    dtype, products = dtypes
    reference = rounded_reference(path, space, dtype)
    prompts = [(5, 6, 7), (8,), (9,) * 20]
    targets = ("centre", "base", 0, 1)
    requests = [LogprobsRequest(t, p, CONTINUATION) for t in targets for p in prompts]
    async with running_engine(path, space, dtype=dtype, products=products) as engine:
        assert (engine.traits.base_dtype, engine.traits.products) == dtypes
        for step in STEPS:  # the centre is exact, however little of a step 16 bits can see
            assert await engine.apply(step) == reference.centre.apply(step)
        await engine.load(GENOMES_G)
        found = await score_all(engine, requests)
        sampled = await asyncio.gather(*(engine.sample(request(0, p)) for p in prompts))
        for action, prompt in zip(sampled, prompts, strict=True):  # what is cached says the same
            again = await engine.logprobs(LogprobsRequest(0, prompt, action.tokens_T))
            assert tuple(again) == action.logprobs_T
    for asked, logprobs_T in zip(requests, found, strict=True):
        become_rounded(reference, who(GENOMES_G, asked.target), dtype)
        (logits,) = reference.logits([asked.prompt_T + CONTINUATION])
        expected = logits[len(asked.prompt_T) - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(CONTINUATION)[:, None]).flatten()
        torch.testing.assert_close(torch.tensor(logprobs_T), expected, rtol=0, atol=CLOSE[dtypes])


def become_rounded(reference: Reference, who: Genome | Literal["base"], dtype: str) -> None:
    """A genome's low-rank part is not rounded, and what a step has moved is."""
    rounded = getattr(torch, dtype)
    centre = {name: w.to(rounded).float() for name, w in reference.centre.weights.items()}
    moved = reference.centre
    if who != "base":
        reference.centre = Centre(centre, reference.space)
    reference.become(who)
    reference.centre = moved


@pytest.mark.daily
@pytest.mark.parametrize(
    ("family", "dtypes"),
    sampled(itertools.product(("qwen2", "gemma3", "gpt_neox", "all experts"), CLOSE), 5),
)
async def test_answers_are_those_of_float32_up_to_rounding(
    tiny_model: TinyModel, family: str, dtypes: tuple[str, str]
) -> None:
    await check(tiny_model(family), LowRank(rank=2), dtypes)


async def test_a_checkpoint_whose_config_tells_no_dtype_has_that_of_its_weights(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.bfloat16)
    save_with_tokenizer(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for products in ("float32", "bfloat16"):
        options = {"dtype": "auto", "products": products}
        async with running_engine(tmp_path / "model", LowRank(), **options) as engine:
            assert (engine.traits.base_dtype, engine.traits.products) == ("bfloat16", products)
