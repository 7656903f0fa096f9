"""Transposed weights and fused experts in real vLLM, held against transformers' merged weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import Reference, request, sample_all
from tests.linear_models import make_linear_model

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.usefixtures("warm_vllm"),
    pytest.mark.anyio,
]

STEPS = (
    Step((Term(1, 0.02), Term(2, -0.03), Term(3, 0.1))),
    Step((Term(4, 0.05),), decay=0.25),
)
PROMPTS = ((5, 7, 9), (11,), tuple(range(3, 30)))
SPACES = {
    "transposed, low rank, untied head": ("gpt2, untied", LowRank(rank=2)),
    "transposed, adapters": ("gpt2", Adapter(rank=2, init="orthogonal")),
    "experts, dense": ("qwen3_moe", FullRank()),
    "experts that stay": ("qwen3_moe", LowRank(exclude=("*.experts.*",))),
    "transposed experts with biases, dense": ("gpt_oss", FullRank()),
    "experts under other names in the checkpoint, dense": ("mixtral", FullRank()),
}


@pytest.mark.parametrize("which", SPACES)
async def test_every_target_answers_as_its_merged_weights_would(tmp_path: Path, which: str) -> None:
    family, space = SPACES[which]
    path = make_linear_model(family, tmp_path / "model")
    reference = Reference(path, space)
    builder = VLLMEngineBuilder(max_genomes=3, kv_cache_gib=0.05)
    engine = await builder(model_name=str(path), search_space=space)
    try:
        capacity = engine.traits.capacity
        for step in (None, *STEPS):
            if step is not None:
                assert await engine.apply(step) == reference.centre.apply(step)
            genomes_G = [Genome((Term(100 + g // 2, (-1) ** g * 0.05),)) for g in range(capacity)]
            await engine.load(genomes_G)
            seen: set[tuple[int, ...]] = set()
            for target in ("base", "centre", *range(capacity)):
                asked = [request(target, prompt) for prompt in PROMPTS]
                answers = await sample_all(engine, asked)
                who = genomes_G[target] if isinstance(target, int) else Genome()
                reference.check_greedy(
                    "base" if target == "base" else who, list(zip(asked, answers, strict=True))
                )
                seen |= {answer.tokens_T for answer in answers}
        assert len(seen) > 2 * len(PROMPTS)
        assert await engine.restore(STEPS[:1]) == reference.centre.restore(STEPS[:1])
        await engine.save(tmp_path / "saved")
    finally:
        await engine.close()
    reference.become(Genome())
    expected = dict(named_weights(reference.model))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(weight, expected[name]) for name, weight in named_weights(saved))


@pytest.mark.parametrize("space", [LowRank(), Adapter()], ids=["low rank", "adapter"])
async def test_slots_of_experts_are_refused_before_vllm_starts(
    tmp_path: Path, space: SearchSpaceBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def start(*_: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", start)
    path = make_linear_model("qwen3_moe", tmp_path / "model")
    sentence = (
        r"engine=vllm has no LoRA slots for fused experts, and the search space perturbs "
        r"model\.layers\.0\.mlp\.experts\.gate_up_proj\[0\]; leave them out "
        r"\(search_space\.exclude='\*\.experts\.\*'\), or use engine=torch"
    )
    with pytest.raises(ConfigError, match=sentence):
        await VLLMEngineBuilder()(model_name=str(path), search_space=space)
