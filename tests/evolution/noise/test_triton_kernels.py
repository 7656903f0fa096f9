"""The Triton twin makes NumPy's noise, and moves weights as the search spaces do, bit for bit.

`TestPrograms` runs on CUDA where there is a GPU, and in Triton's interpreter where there is none.
The interpreter has to be asked for before Triton is first imported and then stays with the process,
so this file runs itself once more, in a process of its own, and with it the tests of centres and
engines that a GPU would run by these programs.
"""

import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import NoiseKind, Part, noise, noise_range
from es_cookbook.evolution.noise import triton_kernels as twin
from es_cookbook.evolution.noise import triton_programs as programs
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank, FullRankSpace
from es_cookbook.evolution.spaces.low_rank import LowRank, LowRankSpace
from tests.families import sampled

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install triton)", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.gpu
INTERPRETING = bool(programs.INTERPRETED)
RUNS_HERE = INTERPRETING or torch.cuda.is_available()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOT = Path(__file__).parents[3]

KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
SHAPES = [(1, 1), (17, 3), (3, 1), (3, 17), (3, 1023)]
"""Of which no tile is a multiple."""
LAYOUTS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "contiguous": lambda height, width: torch.empty(height, width, device=DEVICE),
    "transposed": lambda height, width: torch.empty(width, height, device=DEVICE).mT,
    "strided": lambda height, width: torch.empty(2 * height, 3 * width, device=DEVICE)[::2, 1::3],
}
TERMS = [Term(2**63 - 1, 0.03), Term(5, -1.7), Term(6, 0.0), Term(5, 1e-3), Term(0, 1e-50)]
"""Of these, two have scale 0."""

_SHARES = {"sigma_patterns": ("0.*", "2.*"), "sigma_factors": (0.1, 7.0)}
SHARING: tuple[SearchSpaceBuilder, ...] = (
    Adapter(rank=4, **_SHARES),
    FullRank(partitions=3, **_SHARES),
    FullRank(noise="rademacher", partitions=2),
    LowRank(rank=3, partitions=2, **_SHARES),
)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also of zeros' signs."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    found, expected = found.cpu().contiguous(), expected.cpu().contiguous()
    return found.dtype == expected.dtype and torch.equal(found.view(bits), expected.view(bits))


def start_of(shape: tuple[int, ...]) -> torch.Tensor:
    """A weight to move, on the CPU, with zeros of both signs in it."""
    weight = torch.from_numpy(np.asarray(0.5 * noise(1, "start", shape)))
    weight.view(-1)[::7] = 0.0
    weight.view(-1)[::14] = -0.0
    return weight


class TestPrograms:
    __test__ = RUNS_HERE

    @given(st.sampled_from(KINDS), st.integers(0, 2**45), st.integers(1, 9), st.data())
    @settings(max_examples=10)
    def test_any_region_and_nothing_beside_it(
        self, kind: NoiseKind, first: int, num_rows: int, data: st.DataObject
    ) -> None:
        """The region may be far into a parameter, and of rows that no block ends with."""
        width = data.draw(st.integers(1, 600))
        left, right = sorted(data.draw(st.lists(st.integers(0, width), min_size=2, max_size=2)))
        seed = data.draw(st.integers(0, 2**63 - 1))
        found = torch.zeros(num_rows + 2, width, device=DEVICE)
        part = Part((first, first + num_rows), (left, right), width)
        terms = twin.device_terms([Term(seed, 1.0)], DEVICE)
        twin.add_dense_(found[1:-1, left:right], "w", terms, kind, part)
        expected = torch.zeros(num_rows + 2, width)
        start, stop = first * width, (first + num_rows) * width
        rows = torch.from_numpy(noise_range(seed, "w", start, stop, kind)).view(num_rows, width)
        expected[1:-1, left:right] = rows[:, left:right]
        assert same_bits(found, expected)

    @pytest.mark.parametrize(
        ("layout", "kind"), list(zip(LAYOUTS, [*KINDS, KINDS[0]], strict=True))
    )
    @pytest.mark.parametrize("shape", sampled([*SHAPES, (23, 190)], 3))
    def test_a_dense_step(self, layout: str, kind: NoiseKind, shape: tuple[int, int]) -> None:
        expected, found = start_of(shape), LAYOUTS[layout](*shape)
        found.copy_(expected)
        FullRankSpace({"w": shape}, kind).add_terms_("w", expected, TERMS)
        twin.add_dense_(found, "w", twin.device_terms(TERMS, DEVICE), kind)
        assert same_bits(found, expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(), (0, 3), (5000,), (2, 3, 5)])
    def test_a_step_of_all_axes(self, kind: NoiseKind, shape: tuple[int, ...]) -> None:
        expected, found = start_of(shape), start_of(shape).to(DEVICE)
        space = FullRankSpace({"w": shape}, kind)
        space.add_terms_("w", expected, TERMS)
        space.device_adder(TERMS, DEVICE)("w", found, None)
        assert same_bits(found, expected)

    @pytest.mark.parametrize(("layout", "rank"), list(zip(LAYOUTS, [1, 3, 8], strict=True)))
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_low_rank_step(self, layout: str, rank: int, kind: NoiseKind) -> None:
        for shape in sampled([*SHAPES, (70, 190)], 2) if kind == "gaussian" else [(33, 129)]:
            expected, found = start_of(shape), LAYOUTS[layout](*shape)
            found.copy_(expected)
            LowRankSpace({"w": shape}, kind, rank=rank).add_terms_("w", expected, TERMS)
            twin.add_low_rank_(found, "w", twin.device_terms(TERMS, DEVICE, rank), rank, kind)
            assert same_bits(found, expected), shape

    @pytest.mark.parametrize("builder", sampled(SHARING, 2))
    @pytest.mark.parametrize("in_part", [False, True])
    def test_shares(self, builder: SearchSpaceBuilder, in_part: bool) -> None:
        widths = (1000, 150, 150)  # The first one has three runs of a partition.
        space = builder(
            [ParameterInfo(f"{i}.q.weight", (9, width), "linear") for i, width in enumerate(widths)]
        )
        terms = [*TERMS, Term(4, 0.3), Term(9, -0.3)]
        add = space.device_adder(terms, DEVICE)
        for name, (num_rows, num_columns) in space.shapes.items():
            rows, columns = (num_rows // 4, num_rows), (1, num_columns // 2 + 1)
            part = Part(rows, columns, num_columns) if in_part else None
            place = (slice(*rows), slice(*columns)) if in_part else ...
            expected = start_of((num_rows, num_columns))
            found = expected.to(DEVICE, copy=True)
            space.add_terms_(name, expected, terms)
            add(name, found[place], part)
            assert same_bits(found[place], expected[place])

    def test_a_step_of_more_terms_than_are_held_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(twin, "FACTORS_AT_ONCE", 2 * 3 * (20 + 30))  # Two terms.
        shape, terms = (20, 30), [Term(seed, 0.1 * (seed + 1)) for seed in range(5)]
        expected, found = start_of(shape), start_of(shape).to(DEVICE)
        LowRankSpace({"w": shape}, rank=3).add_terms_("w", expected, terms)
        twin.add_low_rank_(found, "w", twin.device_terms(terms, DEVICE, 3), 3)
        assert same_bits(found, expected)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rank", [None, 3])
    def test_shards_move_as_the_whole_does(self, kind: NoiseKind, rank: int | None) -> None:
        shape, expected = (12, 150), start_of((12, 150))
        shapes = {"w": shape}
        space = LowRankSpace(shapes, kind, rank=rank) if rank else FullRankSpace(shapes, kind)
        space.add_terms_("w", expected, TERMS)
        add = space.device_adder(TERMS, DEVICE)
        for rows, columns in [((0, 12), (40, 150)), ((7, 12), (0, 150)), ((11, 12), (149, 150))]:
            region, found, beside = (slice(*rows), slice(*columns)), *map(start_of, [shape] * 2)
            found = found.to(DEVICE)
            add("w", found[region], Part(rows, columns, 150))
            assert same_bits(found[region], expected[region])
            found[region] = beside[region] = 0
            assert same_bits(found, beside), "nothing else was written"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_written_is_rounded_as_torch_rounds(self, dtype: torch.dtype) -> None:
        ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 1 + 2.0**-8 + 2.0**-23, 255.99]
        small = [0.0, -0.0, 1e-45, -1e-40, 1.18e-38, 6e-8, 3e-8, 9.2e-41]
        large = [65504.0, 3.3895e38, 3.4028235e38, -3.4028235e38, math.inf, -math.inf]
        nans = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
        centre = torch.cat([torch.tensor([*ties, *small, *large]), start_of((500,)), nans])[None]
        out = torch.empty(1, *centre.shape, dtype=dtype, device=DEVICE)
        job = twin.Job(out, "w", Part.whole(tuple(centre.shape)), centre=centre.to(DEVICE))
        with np.errstate(over="ignore", invalid="ignore"):
            twin.fill([job], twin.entries_of([[[]]], [0], DEVICE))
            assert same_bits(out[0, :, :-3], centre[:, :-3].to(dtype))
        assert out[0, :, -3:].isnan().all()


_CENTRE, _ENGINES = "tests/evolution/test_centre.py", "tests/engines"
INTERPRETED = {
    "programs and centre": [
        str(Path(__file__)),
        f"{_ENGINES}/test_genome_terms.py",
        # The pinned fingerprints are NumPy's.
        f"{_CENTRE}::test_known_steps",
        f"{_CENTRE}::test_restoring_by_other_threads_equals_having_taken_the_steps[builder1]",
        f"{_CENTRE}::test_a_perturbed_weight_is_the_centre_plus_its_terms",
        "tests/evolution/test_exact.py::"
        "test_replays_threads_and_parts_give_the_same_bits[last0-space0]",
    ],
    "engines": [
        f"{_ENGINES}/torch/test_centre_in_engine.py::"
        "test_restoring_begins_at_a_snapshot_that_can_be_read",
        f"{_ENGINES}/torch/test_targets.py::"
        "test_parts_of_parameters_and_transposed_ones[gpt2-adapter]",
    ],
}
"""There, centres and engines do with the programs all that they do with them on a GPU."""


@pytest.mark.skipif(RUNS_HERE, reason="the programs run in this process")
@pytest.mark.parametrize("what", INTERPRETED)
@pytest.mark.slow
def test_in_tritons_interpreter(what: str) -> None:
    tests = INTERPRETED[what]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    if what == "engines":  # Its tests are named one by one, and not those that are sampled today.
        environment["FAMILIES"] = "all"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"\d passed", done.stdout), done.stdout


TILE = {"start": "i64", "pitch": "i64", "length": "i64", "tiles_across": "i32", "key": "i64"}
TERMS_ARGUMENTS = {"table": "*fp32", "seeds": "*i64", "scales": "*fp32", "num_terms": "i32"}
STRIDES = dict.fromkeys(["run_stride", "stride"], "i32")
PARTITION = {"partition_key": "i64", "num_partitions": "i32"}
COMPILED = {
    "dense_program": (
        {"weight": "*fp32", **TERMS_ARGUMENTS, **TILE, **STRIDES, **PARTITION},
        {"GAUSSIAN": True, "LANES": 16, "BLOCKS": 128, "DIVIDED": True},
    ),
    "slots_program": (
        {
            **dict.fromkeys(["jobs", "job_of_tile", "places", "shifts", "seeds"], "*i64"),
            **dict.fromkeys(["factors", "table", "scales"], "*fp32"),
            **dict.fromkeys(["num_entries", "num_terms"], "i32"),
        },
        {
            **{"SIZE": 16, "DTYPE": tl.bfloat16, "DENSE": True},
            **{"GAUSSIAN": True, "LANES": 16, "BLOCKS": 128},
        },
    ),
    "rank_one_program": (
        {
            **dict.fromkeys(["weight", "columns", "rows"], "*fp32"),
            **dict.fromkeys(["num_updates", "num_rows", "num_columns", "tiles_across"], "i32"),
            **dict.fromkeys(["row_stride", "column_stride"], "i32"),
        },
        {"ROWS": 32, "COLUMNS": 128},
    ),
}


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_programs_neither_fuse_nor_flush(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Needs no GPU: Triton brings a compiler for each of NVIDIA's. Even when asked to fuse...
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    arguments, constants = COMPILED[name]
    types = {**arguments, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(getattr(programs, name), types, constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}
    )
    ptx = compiled.asm["ptx"]
    floats = re.findall(r"\b((?:mul|add|sub|fma|mad)\.[a-z.]*f32)", ptx)
    assert set(floats) == {"mul.rn.f32", "add.rn.f32"}
    # A slot's factor is one more product.
    products = floats.count("mul.rn.f32") // (2 if name == "slots_program" else 1)
    assert products == floats.count("add.rn.f32") >= 16
