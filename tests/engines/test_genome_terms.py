"""Genomes' factors as an engine holds them; in Triton's interpreter, on a GPU's path too.

`tests/evolution/noise/test_triton_kernels.py` runs this file in the interpreter.
"""

import math

import numpy as np
import pytest
import torch

from es_cookbook.engines.genome_terms import GenomeFactors, Slots
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.noise import NoiseKind
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.factors import term_scales
from es_cookbook.evolution.spaces.low_rank import LowRank, LowRankSpace
from tests.evolution.spaces.test_low_rank import factors_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OUT, IN = 37, 70
GENOMES = [
    Genome((Term(1, 0.3), Term(2, -0.2))),
    Genome((Term(1, -0.3),)),
    Genome(),
    Genome((Term(2**63 - 1, 0.7),)),
]


def slots(rank: int, dtype: torch.dtype, rows: int, columns: int) -> list[torch.Tensor]:
    """Six places of more ranks than two terms need, as they were before."""
    a = torch.full((6, 2 * rank + 1, columns), 9.0, dtype=dtype, device=DEVICE)
    return [a, torch.full((6, rows, 2 * rank + 1), 9.0, dtype=dtype, device=DEVICE)]


@pytest.mark.parametrize(
    ("rank", "kind", "dtype"),
    [
        (1, "gaussian", torch.bfloat16),
        (3, "gaussian", torch.float32),
        (3, "rademacher", torch.bfloat16),
        (8, "gaussian", torch.bfloat16),
    ],
)
def test_factors_of_all_weights_are_written_scaled_and_cast(
    rank: int, kind: NoiseKind, dtype: torch.dtype
) -> None:
    shapes = {"w": (OUT, IN), "one row": (1, 3), "one column": (17, 1), "wide": (3, 341)}
    space = LowRankSpace(shapes, kind, rank=rank)
    terms = GenomeFactors(GENOMES, space, DEVICE)
    assert (terms.num_genomes, terms.num_ranks) == (4, 2 * rank)
    rows = {name: slice(0, height) for name, (height, _) in shapes.items()} | {"w": slice(5, 30)}
    columns = {name: slice(0, width) for name, (_, width) in shapes.items()} | {"w": slice(11, 70)}

    def empty() -> dict[str, list[torch.Tensor]]:
        sizes = {n: (r.stop - r.start, columns[n].stop - columns[n].start) for n, r in rows.items()}
        return {name: slots(rank, dtype, *size) for name, size in sizes.items()}

    expected = {name: [t.cpu() for t in tensors] for name, tensors in empty().items()}
    for name, (expected_a, expected_b) in expected.items():
        for g, genome in enumerate(GENOMES):
            for t in range(2):
                term = genome.terms[t] if t < len(genome.terms) else Term(1, 0.0)
                a, b = (torch.from_numpy(factor) for factor in factors_of(space, name, term.seed))
                ranks = slice(t * rank, (t + 1) * rank)
                scaled = a[rows[name]] * torch.tensor(term_scales([term.coefficient], rank))
                expected_b[g, :, ranks] = scaled.to(dtype)
                expected_a[g, ranks] = b[columns[name]].mT.to(dtype)
    # Slices are made where the slots are; places, in any order, on the CPU.
    for in_places in (False, True):
        found = empty()
        for name, tensors in found.items():
            which = rows[name], columns[name]
            if in_places:
                which = torch.arange(OUT)[which[0]], torch.arange(341)[which[1]]
            terms.write(Slots(name, *tensors, *which))
        terms.finish()
        for name, tensors in found.items():
            for tensor, wanted in zip(tensors, expected[name], strict=True):
                bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
                assert torch.equal(tensor.cpu().view(bits), wanted.view(bits)), name
    backwards = empty()["w"]
    terms.write(Slots("w", *backwards, torch.arange(29, 4, -1), torch.arange(69, 10, -1)))
    assert torch.equal(backwards[0].cpu(), expected["w"][0].flip(2))
    assert torch.equal(backwards[1].cpu()[:4], expected["w"][1].flip(1)[:4])


@pytest.mark.parametrize(("rank", "partitions"), [(1, 1), (3, 1), (2, 2)])
def test_a_weight_has_its_own_share_of_every_term(rank: int, partitions: int) -> None:
    parameters = [ParameterInfo(f"{i}.weight", (OUT, IN), "linear") for i in range(4)]
    options = {"sigma_patterns": ("1.*", "2.*"), "sigma_factors": (0.1, 3.0)}
    space = LowRank(rank=rank, partitions=partitions, **options)(parameters)
    genomes_G = [
        Genome((Term(4, 0.3), Term(7, -0.2))),
        Genome((Term(4, -0.3),)),
        Genome((Term(7, 0.3), Term(9, 0.3))),
        Genome(),
    ]
    terms = GenomeFactors(genomes_G, space, DEVICE)
    for i, factor in enumerate((1.0, 0.1, 3.0, 1.0)):
        name, (a_slots, b_slots) = f"{i}.weight", slots(rank, torch.float32, OUT, IN)
        terms.write(Slots(name, a_slots, b_slots))
        terms.finish()
        for g, genome in enumerate(genomes_G):
            for t in range(2):
                ranks = slice(t * rank, (t + 1) * rank)
                term = genome.terms[t] if t < len(genome.terms) else None
                found_a, found_b = a_slots[g, ranks].cpu(), b_slots[g, :, ranks].cpu()
                own = space.shares.own(name, [term]) if term is not None else []
                if partitions == 1:
                    assert bool(own) == (term is not None)
                if term is None or not own:
                    assert not found_b.any()
                    assert (found_a != 9.0).all(), "not what was there before"
                    continue
                a, b = (torch.from_numpy(made) for made in factors_of(space, name, term.seed))
                by = term.coefficient * factor * math.sqrt(partitions)
                scale = np.float32(by / math.sqrt(rank))
                assert torch.equal(found_b, a * torch.tensor(scale))
                assert torch.equal(found_a, b.mT)


@pytest.mark.parametrize(
    ("noise", "dtype"),
    [("gaussian", torch.bfloat16), ("gaussian", torch.float32), ("rademacher", torch.bfloat16)],
)
def test_adapters_are_the_centre_and_the_genomes_terms(
    noise: NoiseKind, dtype: torch.dtype
) -> None:
    rank = 4
    parameters = [ParameterInfo(f"{i}.weight", (OUT, IN), "linear") for i in range(2)]
    space = Adapter(rank=rank, init="orthogonal", noise=noise, alpha=3.0)(parameters)
    assert space.adapter is not None
    centre = Centre({}, space, 1, device=DEVICE)
    centre.apply(Step((Term(8, 0.5), Term(9, -0.5))))
    places, rows, columns = [3, 0, 1, 4], slice(5, 30), slice(11, 70)
    adapters = GenomeFactors(GENOMES, space, DEVICE, centre, places)
    assert (adapters.num_genomes, adapters.num_ranks) == (4, rank)
    found = {name: slots(2, dtype, 25, 59) for name in space.adapter.targets}
    expected = {name: [t.to("cpu", copy=True) for t in found[name]] for name in found}
    for name, (a, b) in found.items():
        adapters.write(Slots(name, a, b, rows, columns))
    adapters.finish()
    for name, (expected_a, expected_b) in expected.items():
        of_a, of_b = space.adapter.targets[name]
        for genome, place in zip(GENOMES, places, strict=True):
            a, b = (centre.perturbed(genome, factor).cpu() for factor in (of_a, of_b))
            expected_a[place, :rank] = a[:, columns].to(dtype)
            expected_b[place, :, :rank] = (b[rows] * space.adapter.lora.scale).to(dtype)
        for tensor, wanted in zip(found[name], (expected_a, expected_b), strict=True):
            bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
            assert torch.equal(tensor.cpu().view(bits), wanted.view(bits))
