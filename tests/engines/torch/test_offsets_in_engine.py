"""Genomes with coordinates of their own in the torch engine, and over the wire."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from es_cookbook.engines.wire import decode_genomes, decode_steps, encode_genomes, encode_step
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.rules import Offsets, OffsetsRule
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.singular_values import SingularValues
from tests.adapters import make_adapter
from tests.engines.torch.reference import Reference, request, running_engine, sample_all

pytestmark = pytest.mark.anyio

PROMPTS = ((5, 7, 9), (11,), (5, 7, 9, 12, 30))
KINDS = ("singular values", "adapter", "full rank")


def space_of(kind: str, model: Path, path: Path) -> SearchSpaceBuilder:
    if kind == "singular values":
        return SingularValues(start=str(make_adapter(model, path / "adapter")), fraction=0.5)
    return Adapter(rank=2) if kind == "adapter" else FullRank()


@pytest.mark.parametrize("kind", KINDS)
async def test_every_target_answers_as_its_merged_weights_would(
    tiny_model: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    model = tiny_model("qwen2")
    space = space_of(kind, model, tmp_path)
    reference = Reference(model, space)
    size = sum(weight.numel() for weight in reference.centre.weights.values())
    rng = np.random.default_rng(0)

    def point() -> Offsets:
        return Offsets.of(rng.normal(size=size) * (2 if kind == "singular values" else 0.1))

    genomes_G = [Genome(offsets=point()), Genome((Term(3, 0.1),)), Genome((Term(4, 0.1),), point())]
    steps = [Step(rule=OffsetsRule(point(), 1.0)), Step((Term(7, 0.1),))]
    assert decode_genomes(encode_genomes(genomes_G)) == genomes_G
    assert list(decode_steps(b"".join(map(encode_step, steps)))) == steps
    seen: set[tuple[int, ...]] = set()
    async with running_engine(model, space) as engine:
        for step in steps:
            assert await engine.apply(step) == reference.centre.apply(step)
            await engine.load(genomes_G)
            for target in (*range(len(genomes_G)), "centre", "base"):
                asked = [request(target, prompt) for prompt in PROMPTS]
                answers = list(zip(asked, await sample_all(engine, asked), strict=True))
                who = genomes_G[target] if isinstance(target, int) else Genome()
                reference.check_greedy("base" if target == "base" else who, answers)
                seen |= {action.tokens_T for _, action in answers}
        assert await engine.restore(steps) == reference.centre.restore(steps)
    assert len(seen) > 2 * len(PROMPTS)  # genomes answer each in their own way
