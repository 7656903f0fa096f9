"""Adapters in the torch engine: every target answers as PEFT, or merged weights, would."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.full_rank import FullRank
from tests.engines.torch.reference import Reference, request, running_engine, sample_all, score_all

pytestmark = pytest.mark.anyio

STEPS = (Step((Term(1, 0.05), Term(2, -0.1))), Step((Term(3, 0.02),), decay=0.2))
PROMPTS = ((5, 7, 9), (11,), (5, 7, 9, 12, 30))


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
async def test_every_target_answers_as_its_merged_weights_would(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    space = Adapter(rank=3, alpha=12.0, exclude=("*up_proj*",))
    reference = Reference(tiny_model(family), space)
    genomes_G = [Genome((Term(10 + g // 2, 0.1 * (1 - 2 * (g % 2))),)) for g in range(4)]
    genomes_G.append(Genome((Term(20, 0.1), Term(21, -0.05))))
    await check_every_target(tiny_model(family), space, reference, genomes_G)


async def test_targets_shares_masks_and_an_orthogonal_start(
    tiny_model: Callable[[str], Path],
) -> None:
    space = Adapter(
        rank=4,
        targets=("q_proj", "down_proj"),
        init="orthogonal",
        perturb="alternating",
        density=0.5,
        num_blocks=2,
        sigma_patterns=("*lora_A*",),
        sigma_factors=(2.5,),
    )
    path = tiny_model("llama")
    genomes_G = [Genome((Term(10 + g // 2, 0.5 * (1 - 2 * (g % 2))),)) for g in range(8)]
    await check_every_target(path, space, Reference(path, space), genomes_G)


async def check_every_target(
    path: Path, space: Adapter, reference: Reference, genomes_G: Sequence[Genome]
) -> None:
    """Before any step and after each: genomes, centre and base."""
    async with running_engine(path, space) as engine:
        for step in (None, *STEPS):
            if step is not None:
                assert await engine.apply(step) == reference.centre.apply(step)
                asked = [request("centre", prompt) for prompt in PROMPTS]
                answers = zip(asked, await sample_all(engine, asked), strict=True)
                reference.check_greedy(Genome(), list(answers))
            await engine.load(genomes_G)
            for target in (*range(len(genomes_G)), "centre", "base"):
                asked = [request(target, prompt) for prompt in PROMPTS]
                answers = zip(asked, await sample_all(engine, asked), strict=True)
                who = genomes_G[target] if isinstance(target, int) else Genome()
                reference.check_greedy("base" if target == "base" else who, list(answers))
        assert await engine.restore(STEPS[:1]) == reference.centre.restore(STEPS[:1])


async def test_it_goes_on_from_an_adapter_of_pefts_and_answers_as_peft_does(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    prompt, continuation = (5, 7, 9), (11, 12, 13)
    with torch.no_grad():
        logits = peft(torch.tensor([[*prompt, *continuation]])).logits[0]
    logprobs = logits[2:-1].log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    async with running_engine(
        tiny_model("qwen2"), Adapter(start=str(tmp_path / "adapter"))
    ) as engine:
        asked = [LogprobsRequest(target, prompt, continuation) for target in ("centre", "base")]
        centre, of_base = await score_all(engine, asked)
        torch.testing.assert_close(torch.tensor(centre), logprobs, rtol=0, atol=1e-5)
        assert not torch.allclose(torch.tensor(of_base), logprobs, atol=1e-3)


async def test_the_saved_centre_has_the_adapter_merged(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    prompt, continuation = (5, 7, 9), (11, 12, 13)
    asked = [LogprobsRequest("centre", prompt, continuation)]
    async with running_engine(tiny_model("qwen2"), Adapter(rank=2)) as engine:
        await engine.apply(STEPS[0])
        (expected,) = await score_all(engine, asked)
        await engine.save(tmp_path / "saved")
    async with running_engine(tmp_path / "saved", FullRank()) as engine:
        (found,) = await score_all(engine, asked)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-4)
