"""Packed products in bfloat16: weights are packed again after every step."""

import dataclasses

import pytest
import torch

from es_cookbook.engines.base import LogprobsRequest, Target
from es_cookbook.engines.torch.kernels.modules import FLAT, Path
from es_cookbook.engines.torch.kernels.products import packs
from es_cookbook.engines.torch.resident_weights import ResidentWeights
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.engines.torch.reference import Reference, running_engine, score_all
from tests.tiny_models import TinyModel

GENOMES_G = [Genome((Term(7, 0.1),)), Genome((Term(7, -0.1),))]
PROMPTS = [(5, 6, 7), (8,), (9, 9, 9, 9, 9, 9, 9, 9, 9)]


pytestmark = pytest.mark.skipif(
    not packs(), reason="oneDNN packs no weights in bfloat16 on this processor"
)
BFLOAT16 = {"dtype": "bfloat16", "products": "bfloat16"}
OWN = Path(products=torch.bfloat16)
WIDE = dataclasses.replace(FLAT, wide=True, products=torch.bfloat16, kept=torch.bfloat16)
CONTINUATION = (5, 9, 7, 8, 6, 11)
CLOSE = 0.06
"""Mean rounding of activations."""


@pytest.mark.daily
@pytest.mark.parametrize(
    ("family", "space"),
    [
        ("qwen2", LowRank()),
        ("qwen2", LowRank(include=("*.q_proj.weight", "*.up_proj.weight"))),
        ("qwen2", Adapter(rank=2)),
        ("gpt_neox", LowRank()),
        ("gpt_neox", Adapter(rank=2)),
    ],
)
async def test_moved_weights_are_packed_again(
    tiny_model: TinyModel, family: str, space: SearchSpaceBuilder
) -> None:
    """As an engine that multiplies the same weights as they are, in float32."""
    path = tiny_model(family)
    targets: tuple[Target, ...] = ("centre", "base", 0, 1)
    asked = [
        LogprobsRequest(target, prompt, CONTINUATION) for target in targets for prompt in PROMPTS
    ]
    steps = Step((Term(1, 0.1),)), Step((Term(2, -0.15),), decay=0.1)
    async with (
        running_engine(path, space, **BFLOAT16) as packed,
        running_engine(path, space, dtype="bfloat16", products="float32") as plain,
    ):
        for change in (*steps, None):
            fingerprints: list[int] = []
            answers: list[torch.Tensor] = []
            for engine in (packed, plain):
                if change is None:
                    await engine.rest()
                    fingerprints.append(await engine.restore([Step((Term(3, 0.1),))]))
                else:
                    fingerprints.append(await engine.apply(change))
                await engine.load(GENOMES_G)
                answers.append(torch.tensor(await score_all(engine, asked)))
            assert fingerprints[0] == fingerprints[1]
            assert (answers[0] - answers[1]).abs().mean() < CLOSE
            assert not torch.equal(*answers)


@pytest.mark.parametrize(("family", "path"), [("qwen2", WIDE), ("qwen2", OWN), ("gpt_neox", WIDE)])
def test_packed_copies_free_weights_that_only_products_read_and_steps_give_the_same_bits(
    tiny_model: TinyModel, family: str, path: Path
) -> None:
    reference = Reference(tiny_model(family), LowRank())
    base, step = reference.model.bfloat16(), Step((Term(1, 0.1),), decay=0.1)
    weights = ResidentWeights(base, reference.space, 1, path)
    plain = ResidentWeights(
        base, reference.space, 1, dataclasses.replace(path, products=torch.float32)
    )
    assert weights.apply(step) == plain.apply(step)
    bytes_of = {
        name: group.weight.untyped_storage().nbytes()
        for name, group, _ in weights.model.group_members()
    }
    kept = {name for name, size in bytes_of.items() if size}
    assert kept == ({"lm_head.weight"} if family == "qwen2" and path.flat else set(bytes_of))
    weights.model.unpack(bytes_of)
    expected = dict(plain.model.module.named_parameters())
    for name, found in weights.model.module.named_parameters():
        assert torch.equal(found, expected[name]), name
