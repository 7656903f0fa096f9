"""Sizes that no tile is a multiple of, offsets, and views: every program, bit for bit like NumPy.

`test_kernels.py` runs this file in Triton's interpreter; `test_slots.py` has such shapes as well.
"""

import importlib.util
from collections.abc import Callable

import pytest
import torch

from es_cookbook.evolution.noise import NoiseKind, noise_range
from es_cookbook.evolution.noise.tensors import Part
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.evolution.spaces.low_rank import LowRankSpace

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)

from es_cookbook.evolution.noise.triton import kernels as twin
from tests.evolution.noise.triton.test_kernels import (
    DEVICE,
    KINDS,
    RUNS_HERE,
    TERMS,
    same_bits,
    start_of,
)

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="needs a GPU, or Triton's interpreter")

SIZES = (1, 3, 17, 1023)
SHAPES = [(1, 1), (17, 3), *((3, n) for n in SIZES)]
TALL = (1023, 3)
"""Dense programs take a row each of a view that is not contiguous: too many to be interpreted."""
LAYOUTS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "contiguous": lambda height, width: torch.empty(height, width, device=DEVICE),
    "transposed": lambda height, width: torch.empty(width, height, device=DEVICE).mT,
    "strided": lambda height, width: torch.empty(2 * height, 3 * width, device=DEVICE)[::2, 1::3],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_noise_from_any_element_on(kind: NoiseKind, size: int) -> None:
    for start in (0, 1, 15, 16, 255, 2**33 + 7):
        out = torch.empty(size, device=DEVICE)
        twin.noise_into(out, 3, "w", kind, Part((start, start + size), (0, 1), 1))
        expected = torch.from_numpy(noise_range(3, "w", start, start + size, kind))
        assert same_bits(out, expected), start


@pytest.mark.parametrize(("layout", "kind"), list(zip(LAYOUTS, [*KINDS, KINDS[0]], strict=True)))
def test_a_genomes_own_weights_and_a_dense_step(layout: str, kind: NoiseKind) -> None:
    for shape in [*SHAPES, TALL] if layout == "contiguous" else SHAPES:
        expected = start_of(shape)
        FullRankSpace({"w": shape}, kind).add_terms_("w", expected, TERMS)
        terms = twin.dense_terms(TERMS, DEVICE)
        centre, out = LAYOUTS[layout](*shape), LAYOUTS[layout](*shape)
        centre.copy_(start_of(shape))
        twin.perturbed_into(out, centre, "w", terms, kind)
        assert same_bits(out, expected), shape
        assert same_bits(centre, start_of(shape)), shape
        twin.add_dense_(centre, "w", terms, kind)
        assert same_bits(centre, expected), shape


@pytest.mark.parametrize(("layout", "rank"), list(zip(LAYOUTS, [1, 3, 8], strict=True)))
def test_a_low_rank_step(layout: str, rank: int) -> None:
    for shape in [*SHAPES, TALL]:
        expected, found = start_of(shape), LAYOUTS[layout](*shape)
        LowRankSpace({"w": shape}, rank=rank).add_terms_("w", expected, TERMS)
        found.copy_(start_of(shape))
        twin.add_low_rank_(found, "w", twin.low_rank_terms(TERMS, rank, DEVICE))
        assert same_bits(found, expected), shape


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_part_of_one_element_and_of_all_but_one(rank: int) -> None:
    shape = (17, 33)
    for rows, columns in [((16, 17), (32, 33)), ((1, 17), (1, 33)), ((0, 17), (3, 4))]:
        region, part = (slice(*rows), slice(*columns)), Part(rows, columns, 33)
        for space, adds in (
            (LowRankSpace({"w": shape}, rank=rank), twin.add_low_rank_),
            (FullRankSpace({"w": shape}), twin.add_dense_),
        ):
            expected, found = start_of(shape), start_of(shape).to(DEVICE)
            space.add_terms_("w", expected, TERMS)
            is_dense = space.low_rank is None
            terms = (
                twin.dense_terms(TERMS, DEVICE)
                if is_dense
                else twin.low_rank_terms(TERMS, rank, DEVICE)
            )
            adds(found[region], "w", terms, part=part)
            assert same_bits(found[region], expected[region])
            found[region] = 0
            beside = start_of(shape)
            beside[region] = 0
            assert same_bits(found, beside), "nothing else was written"
