"""What dense genomes of fused experts share with the base, and what they do not."""

from pathlib import Path

import pytest

from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.full_rank import FullRank
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.linear_models import make_linear_model

pytestmark = pytest.mark.anyio

PROMPTS = ((5, 7, 9), (11,), (3, 4, 20, 21, 22, 8, 6))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2"])
async def test_genomes_that_move_a_part_of_a_parameter_leave_the_base_alone(
    tmp_path: Path, family: str
) -> None:
    path = make_linear_model(family, tmp_path / "model")
    which = "model.layers.0.mlp.experts.*" if family == "qwen3_moe" else "*.c_fc.weight"
    space = FullRank(include=(which,))
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
