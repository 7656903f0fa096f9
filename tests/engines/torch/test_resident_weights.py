"""Genomes that move parts of parameters, or transposed ones: all of them, and not the base."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.linear_models import make_linear_model

pytestmark = pytest.mark.anyio

PROMPTS = ((5, 7, 9), (11,), (3, 4, 20, 21, 22, 8, 6))


@pytest.mark.parametrize("kind", [FullRank, LowRank, partial(Adapter, rank=2, init="orthogonal")])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gpt_oss"])
async def test_every_target_answers_as_its_merged_weights_would(
    tmp_path: Path, family: str, kind: Callable[..., SearchSpaceBuilder]
) -> None:
    path = make_linear_model(family, tmp_path / "model")
    space = kind(
        include=("*.c_fc.weight",) if family == "gpt2" else ("*.layers.0.mlp.experts.*_proj*]",)
    )
    reference = Reference(path, space)
    genomes_G = [Genome((Term(1, 0.2),)), Genome((Term(1, -0.2),))]
    step = Step((Term(2, 0.2),))
    async with running_engine(path, space) as engine:
        assert await engine.apply(step) == reference.centre.apply(step)
        await engine.load(genomes_G)
        seen: set[tuple[int, ...]] = set()
        for target in ("base", "centre", 0, 1):
            asked = [request(target, prompt) for prompt in PROMPTS]
            answers = await sample_all(engine, asked)
            who = genomes_G[target] if isinstance(target, int) else Genome()
            pairs = list(zip(asked, answers, strict=True))
            reference.check_greedy("base" if target == "base" else who, pairs)
            seen |= {answer.tokens_T for answer in answers}
        assert len(seen) > 2 * len(PROMPTS)
