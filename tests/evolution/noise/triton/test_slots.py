"""One launch writes the factors of all genomes as NumPy makes them, bit for bit, and nothing else.

`test_kernels.py` runs this file in Triton's interpreter; on a machine with a GPU it runs there.
"""

import importlib.util

import numpy as np
import pytest
import torch

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import NoiseKind
from es_cookbook.evolution.noise.tensors import Mask, Part
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.evolution.spaces.low_rank import LowRankSpace
from tests.evolution.spaces.test_low_rank import factors_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)

from es_cookbook.evolution.noise.triton import kernels, slots
from tests.evolution.noise.triton.test_kernels import DEVICE, RUNS_HERE, same_bits, start_of

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="needs a GPU, or Triton's interpreter")

TERMS_G = [
    [Term(2**63 - 1, 0.03), Term(5, -1.7)],
    [Term(5, 1.7)],
    [],
    [Term(6, 0.0), Term(0, 1e-50)],
]
"""Of four genomes: two terms, a twin's, none, and two of scale 0."""
NOTHING = Term(0, 0.0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The programs that were started."""
    started: list[object] = []
    real = kernels.launch

    def counted(program: object, *arguments: object, **settings: object) -> None:
        started.append(program)
        real(program, *arguments, **settings)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(slots, "launch", counted)
    return started


@pytest.mark.parametrize(
    ("rank", "kind", "dtype"),
    [
        (1, "gaussian", torch.bfloat16),
        (3, "gaussian", torch.float32),
        (3, "rademacher", torch.bfloat16),
        (8, "gaussian", torch.bfloat16),
    ],
)
def test_low_rank_factors_of_all_weights_and_genomes(
    rank: int, kind: NoiseKind, dtype: torch.dtype, launches: list[object]
) -> None:
    shapes = {"a": (1, 3), "b": (17, 1), "c": (3, 341 if rank == 3 else 17), "d": (40, 50)}
    parts = {name: Part.whole(shape) for name, shape in shapes.items()}
    parts["d"] = Part((7, 24), (33, 50), 50)
    space = LowRankSpace(shapes, kind, rank=rank)
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, part in parts.items():
        height, width = part.shape
        # Rows of a fused table, and its inputs as the second axis: neither is contiguous.
        lora_a = torch.full((5, width + 2, 2 * rank + 1), 9.0, dtype=dtype, device=DEVICE)
        lora_b = torch.full((5, 2 * rank + 1, height + 5), 9.0, dtype=dtype, device=DEVICE)
        tensors[name] = (lora_a, lora_b)
        of_a, of_b = (tensor.to("cpu", copy=True) for tensor in (lora_a, lora_b))
        for g, terms in enumerate(TERMS_G):
            for t in range(2):
                term = terms[t] if t < len(terms) else NOTHING
                a, b = factors_of(space, name, term.seed)
                scaled = torch.from_numpy(a * space.low_rank.scale(term.coefficient))
                ranks = slice(t * rank, (t + 1) * rank)
                rows, columns = slice(*part.rows), slice(*part.columns)
                of_a[g, 1 : 1 + width, ranks] = torch.from_numpy(b)[columns].to(dtype)
                of_b[g, ranks, 3 : 3 + height] = scaled[rows].mT.to(dtype)
        expected[name] = (of_a, of_b)
    jobs = [
        job
        for name, (lora_a, lora_b) in tensors.items()
        for job in slots.low_rank_jobs(
            name,
            lora_a[:, 1:-1].mT,
            lora_b[:, :, 3 : 3 + parts[name].shape[0]].mT,
            rank,
            parts[name],
        )
    ]
    slots.fill(jobs, slots.low_rank_entries([TERMS_G], rank, DEVICE), kind)
    assert len(launches) == 1
    for name in shapes:
        for found, wanted in zip(tensors[name], expected[name], strict=True):
            assert same_bits(found, wanted), name


@pytest.mark.parametrize(
    ("kind", "mask", "dtype"),
    [
        ("gaussian", None, torch.bfloat16),
        ("gaussian", Mask(7, 20_000), torch.float32),
        ("rademacher", Mask(7, 20_000), torch.bfloat16),
    ],
)
def test_adapters_of_all_genomes(
    kind: NoiseKind, mask: Mask | None, dtype: torch.dtype, launches: list[object]
) -> None:
    shapes = {"A": (3, 341), "B": (17, 3), "one": (1, 1), "shard": (8, 70)}
    parts = {name: Part.whole(shape) for name, shape in shapes.items()}
    parts["shard"] = Part((0, 8), (33, 70), 70)
    space = FullRankSpace(shapes, kind, mask=mask)
    places, factor = [4, 0, 2, 5], float(np.float32(0.3))
    jobs: list[slots.Job] = []
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        height, width = part.shape
        region = slice(*part.rows), slice(*part.columns)
        tensors[name] = torch.full((6, height + 1, width), 9.0, dtype=dtype, device=DEVICE)
        expected[name] = torch.full((6, height + 1, width), 9.0, dtype=dtype)
        for terms, place in zip(TERMS_G, places, strict=True):
            weight = start_of(shapes[name])
            space.add_terms_(name, weight, terms)
            expected[name][place, :height] = (weight[region] * factor).to(dtype)
        centre = start_of(shapes[name]).to(DEVICE)[region]
        jobs.append(slots.Job(tensors[name][:, :height], name, part, centre=centre, factor=factor))
    slots.fill(jobs, slots.dense_entries([TERMS_G], places, DEVICE), kind, mask)
    assert len(launches) == 1
    for name in shapes:
        assert same_bits(tensors[name], expected[name]), name


def test_parameters_of_different_kinds_have_their_own_share_of_terms() -> None:
    shapes = {"w": (5, 4), "v": (3, 6)}
    centres = {name: start_of(shape) for name, shape in shapes.items()}
    terms_of = [[[Term(1, 0.5)], []], [[], [Term(1, -0.1), Term(2, 3.0)]]]
    outs = {name: torch.zeros(2, *shape, device=DEVICE) for name, shape in shapes.items()}
    jobs = [
        slots.Job(out, name, Part.whole(shapes[name]), centre=centres[name].to(DEVICE), kind=kind)
        for kind, (name, out) in enumerate(outs.items())
    ]
    slots.fill(jobs, slots.dense_entries(terms_of, [0, 1], DEVICE))
    for (name, out), terms_G in zip(outs.items(), terms_of, strict=True):
        for g, terms in enumerate(terms_G):
            weight = centres[name].clone()
            FullRankSpace(shapes).add_terms_(name, weight, terms)
            assert same_bits(out[g], weight)


def test_each_dtype_is_one_launch_and_nothing_is_none(launches: list[object]) -> None:
    outs = [torch.zeros(1, 2, 3, dtype=d, device=DEVICE) for d in (torch.float32, torch.bfloat16)]
    outs.append(torch.zeros(1, 0, 3, device=DEVICE))
    jobs = [
        slots.Job(out, "w", Part.whole((out.shape[1], 3)), scaled=False) for out in (*outs, outs[0])
    ]
    slots.fill(jobs, slots.low_rank_entries([[]], 3, DEVICE))
    assert launches == [] and not any(out.any() for out in outs)
    slots.fill(jobs, slots.low_rank_entries([[[Term(3, 1.0)]]], 3, DEVICE))
    assert len(launches) == 2 and all(out.all() for out in outs[:2])


def test_tensors_that_do_not_fit_are_refused() -> None:
    part = Part.whole((4, 6))
    with pytest.raises(ValueError, match=r"w: a tensor of shape \(2, 3, 6\) does not hold places"):
        slots.Job(torch.zeros(2, 3, 6, device=DEVICE), "w", part)
    with pytest.raises(ValueError, match=r"w: the centre must be float32 of shape \(4, 6\), found"):
        slots.Job(
            torch.zeros(2, 4, 6, device=DEVICE), "w", part, centre=torch.zeros(6, 4, device=DEVICE)
        )
    with pytest.raises(ValueError, match=r"w: a place of shape \(4, 5\) has no room for 6 columns"):
        slots.fill(
            [slots.Job(torch.zeros(2, 4, 5, device=DEVICE), "w", part)],
            slots.dense_entries([[[]]], [0], DEVICE),
        )
    with pytest.raises(ValueError, match="w: place 2 is one of 2"):
        slots.fill(
            [slots.Job(torch.zeros(2, 4, 6, device=DEVICE), "w", part)],
            slots.dense_entries([[[]]], [2], DEVICE),
        )
