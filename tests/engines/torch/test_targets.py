"""Every target answers as its merged weights would, wherever genomes, centre and base may differ.

Genomes of parts of parameters, of transposed ones, of adapters, and ones with coordinates.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from es_cookbook import FullRank, LowRank
from es_cookbook.engines.wire import decode_genomes, decode_steps, encode_genomes, encode_step
from es_cookbook.evolution.genome import Genome, Offsets, OffsetsRule, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.cma.singular_values import SingularValues
from tests.adapters import make_adapter
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.families import sampled
from tests.linear_models import make_linear_model
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.gpu
STEPS = (Step((Term(1, 0.05), Term(2, -0.1))), Step((Term(3, 0.02),), decay=0.2))
PROMPTS = ((5, 7, 9), (11,), (3, 4, 20, 21, 22, 8, 6))


def twins(num: int, scale: float) -> list[Genome]:
    return [Genome((Term(10 + g // 2, scale * (1 - 2 * (g % 2))),)) for g in range(num)]


async def check(
    path: Path,
    space: SearchSpaceBuilder,
    genomes_G: Sequence[Genome],
    steps: Sequence[Step | None],
    reference: Reference | None = None,
) -> None:
    """After each step (None: before any); genomes answer each in their own way."""
    reference = reference or Reference(path, space)
    targets = (*range(len(genomes_G)), "centre", "base")
    requests = [request(target, prompt) for target in targets for prompt in PROMPTS]
    seen: set[tuple[int, ...]] = set()
    async with running_engine(path, space) as engine:
        for step in steps:
            if step is not None:
                assert await engine.apply(step) == reference.centre.apply(step)
                before = [request("centre", prompt) for prompt in PROMPTS]
                reference.check_targets([], before, await sample_all(engine, before))
            await engine.load(genomes_G)
            actions = await sample_all(engine, requests)
            reference.check_targets(genomes_G, requests, actions)
            seen |= {action.tokens_T for action in actions}
        taken = [step for step in steps if step is not None]
        for some in (taken, taken[:1]):
            assert await engine.restore(some) == reference.centre.restore(some)
    assert len(seen) > 2 * len(PROMPTS)


@pytest.mark.daily
@pytest.mark.parametrize(
    "kind",
    [FullRank, LowRank, partial(Adapter, rank=2, init="orthogonal")],
    ids=["full rank", "low rank", "adapter"],
)
@pytest.mark.parametrize("family", sampled(["qwen3_moe", "gpt2", "gpt_oss"], 1))
async def test_parts_of_parameters_and_transposed_ones(
    tmp_path: Path, family: str, kind: Callable[..., SearchSpaceBuilder]
) -> None:
    path = make_linear_model(family, tmp_path / "model")
    include = "*.c_fc.weight" if family == "gpt2" else "*.layers.0.mlp.experts.*_proj*]"
    if family == "gpt2" and kind is FullRank:
        include = "*"
    await check(path, kind(include=(include,)), twins(2, 0.2), [Step((Term(2, 0.2),))])


@pytest.mark.daily
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
async def test_adapters(tiny_model: TinyModel, family: str) -> None:
    space = Adapter(rank=3, alpha=12.0, exclude=("*up_proj*",))
    genomes_G = [*twins(4, 0.1), Genome((Term(20, 0.1), Term(21, -0.05)))]
    await check(tiny_model(family), space, genomes_G, [None, *STEPS])


@pytest.mark.daily
@pytest.mark.parametrize("kind", ["singular values", "adapter", "full rank"])
async def test_genomes_with_coordinates(tiny_model: TinyModel, tmp_path: Path, kind: str) -> None:
    model = tiny_model("qwen2")
    space = Adapter(rank=2) if kind == "adapter" else FullRank()
    if kind == "singular values":
        start = str(make_adapter(model, tmp_path / "adapter"))
        space = SingularValues(start=start, fraction=0.5)
    reference = Reference(model, space)
    size = sum(weight.numel() for weight in reference.centre.weights.values())
    rng = np.random.default_rng(0)

    def point() -> Offsets:
        return Offsets.of(rng.normal(size=size) * (2 if kind == "singular values" else 0.1))

    genomes_G = [Genome(offsets=point()), Genome((Term(3, 0.1),)), Genome((Term(4, 0.1),), point())]
    steps = [Step(rule=OffsetsRule(point(), 1.0)), Step((Term(7, 0.1),))]
    assert decode_genomes(encode_genomes(genomes_G)) == genomes_G
    assert list(decode_steps(b"".join(map(encode_step, steps)))) == steps
    await check(model, space, genomes_G, steps, reference)
