"""The whole population in one batch answers as each genome would alone, from merged weights."""

import itertools
import random
from collections.abc import Sequence

import pytest

from es_cookbook import FullRank, LowRank
from es_cookbook.engines.base import Target
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.families import sampled
from tests.tiny_models import FAMILIES, FIRST_CHARACTER, VOCABULARY, TinyModel

GENOMES_G = (
    Genome((Term(11, 0.1),)),
    Genome((Term(11, -0.1),)),
    Genome((Term(12, 0.05), Term(13, -0.1), Term(11, 0.03))),
    Genome(),
)
STEP = Step((Term(21, 0.05), Term(22, -0.05)))
SPACES = (LowRank(rank=1), LowRank(rank=3, noise="rademacher"), FullRank())
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 33)
"""Around the lengths to which prompts are padded, and beyond the tiny models' window."""


def _prompts(lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.choices(range(FIRST_CHARACTER, VOCABULARY), k=n)) for n in lengths]


@pytest.mark.daily
@pytest.mark.parametrize(("family", "space"), sampled(itertools.product(FAMILIES, SPACES), 9))
async def test_a_population_in_one_batch_answers_as_each_genome_alone(
    tiny_model: TinyModel, family: str, space: SearchSpaceBuilder
) -> None:
    path = tiny_model(family)
    reference = Reference(path, space)
    targets: list[Target] = [*range(len(GENOMES_G)), "centre", "base"]
    requests = [request(target, prompt) for target in targets for prompt in _prompts()]
    random.Random(2).shuffle(requests)
    async with running_engine(path, space) as engine:
        assert await engine.apply(STEP) == reference.centre.apply(STEP)
        await engine.load(GENOMES_G)
        actions = await sample_all(engine, requests)
        reference.check_targets(GENOMES_G, requests, actions)
    said = [
        {r.observation: a.tokens_T for r, a in zip(requests, actions, strict=True) if r.target == t}
        for t in (0, 1, 2, "centre")
    ]
    assert all(one != other for one, other in itertools.combinations(said, 2))
