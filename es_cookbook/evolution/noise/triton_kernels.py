"""The noise in Triton: generated on the GPU, where the weights are, bit for bit the same.

Noise is a pure function of (seed, name, element), so only seeds are sent to a GPU, and a shard of a
tensor generates just its part. Here are the steps of the centre, `add_dense_` and `add_low_rank_`,
as `FullRankSpace` and `LowRankSpace` take them: term after term in exact arithmetic, a weight read
and written once for many terms. And `fill` makes the factors of all genomes, in the LoRA slots or
tables that sample with them:

    fill(jobs, entries_of([terms_G], places_G, device, rank))

Every number is what NumPy's arithmetic makes, rounded to float32, and then cast once.

`name` is the parameter's Hugging Face name, `kind` the noise's distribution, and `part` the part of
the parameter that a tensor holds; all of it if None. Terms are sent to the GPU once, for all
parameters:

    terms = device_terms(step.terms, device, rank)
    for name, weight in weights.items():
        add_low_rank_(weight, name, terms, rank)

The kernels are in `es_cookbook.evolution.noise.triton_programs`. They need Triton and an NVIDIA
GPU; with `TRITON_INTERPRET=1`, set before Triton is first imported, they run on the CPU instead,
slowly, which is how they are tested. Work is queued on the current stream without waiting.

A tensor may hold a whole parameter or a part of one (a tensor-parallel shard), as its `Part` says.
Its elements are then runs of neighbours in the parameter, and each run is divided into tiles of
whole Philox blocks, one program per tile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import (
    GAUSSIANS_PER_BLOCK,
    SIGNS_PER_BLOCK,
    UNDIVIDED,
    NoiseKind,
    Part,
    Partitions,
    name_key,
    normal_table,
    partition_name,
)
from es_cookbook.evolution.noise import triton_programs as programs

_MAX_GRID = 2**16 - 1
"""Programs along any but the first axis of a CUDA grid."""
_LANES = {"gaussian": GAUSSIANS_PER_BLOCK, "rademacher": SIGNS_PER_BLOCK}
_TILE_BLOCKS = {"gaussian": 128, "rademacher": 16}
"""Blocks that a program makes at most: 2,048 and 4,096 elements."""


_MAX_STRIDE = 2**19
"""Between neighbours in memory: offsets within a tile are 32-bit numbers."""


class _Runs(NamedTuple):
    """Elements of a parameter: `num_runs` runs of `length`, run i from `start + i * pitch` on."""

    start: int
    pitch: int
    num_runs: int
    length: int


def _as_rows(weight: torch.Tensor, part: Part | None) -> tuple[Part, torch.Tensor]:
    """Return the part that a weight holds, the whole if None, and the weight as its rows.

    Raises:
        RuntimeError: It does not hold this part, or not in rows and columns.
    """
    part = part or Part.whole(tuple(weight.shape))
    return part, weight.view(part.shape)


def _part_runs(part: Part) -> _Runs:
    """Return a part's elements, in as few runs as possible."""
    start = part.rows[0] * part.width + part.columns[0]
    if part.shape[1] == part.width:
        return _Runs(start, 0, 1, part.num_elements)
    return _Runs(start, part.width, *part.shape)


def _tiles_of(
    runs: _Runs, kind: NoiseKind, blocks: int | None = None
) -> tuple[int, tuple[int, int, int, int], dict[str, object]]:
    """Tile runs, in tiles of `blocks` blocks, or a suitable number if None.

    Returns:
        The number of programs, their arguments `start` ... `tiles_across`, and their settings.
    """
    lanes = _LANES[kind]
    all_begin_alike = runs.num_runs == 1 or runs.pitch % lanes == 0
    skipped = runs.start % lanes if all_begin_alike else lanes - 1
    run_blocks = -(-(skipped + runs.length) // lanes)
    blocks = blocks or min(_TILE_BLOCKS[kind], 1 << (run_blocks - 1).bit_length())
    tiles_across = -(-run_blocks // blocks)
    settings: dict[str, object] = {
        "GAUSSIAN": kind == "gaussian",
        "LANES": lanes,
        "BLOCKS": blocks,
        "num_warps": max(1, min(4, blocks * lanes // 512)),
    }
    tiling = runs.start, runs.pitch, runs.length, tiles_across
    return tiles_across * runs.num_runs, tiling, settings


def launch(
    program: object,
    grid: tuple[int, ...],
    out: torch.Tensor,
    *arguments: object,
    **settings: object,
) -> None:
    """Start a program on `out`'s device, on its current stream."""
    launcher = cast("dict[tuple[int, ...], Callable[..., object]]", program)[grid]
    with torch.cuda.device_of(out):
        # The programs round products and sums themselves; without this option Triton warns.
        launcher(out, *arguments, **settings, enable_fp_fusion=False)


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    """Return Q on a device."""
    on_device = torch.from_numpy(normal_table().copy()).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # Other streams will read it too.
    return on_device


def _key_of(name: str) -> int:
    """Return `name_key` as a signed number of the same bits: Triton then always takes 64."""
    key = name_key(name)
    return key - 2**64 if key >= 2**63 else key


_TILE_ROWS, _TILE_COLUMNS = 32, 128
"""Tile of a weight, for one program of rank-1 updates."""
FACTORS_AT_ONCE = 2**24
"""Numbers of factors that are held at once, 64 MiB; a weight is read and written once for these."""


DeviceTerms: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Terms on a device: their seeds, int64, and the scales of their noise, float32."""


def device_terms(terms: Sequence[Term], device: torch.device, rank: int = 1) -> DeviceTerms:
    """Send terms with scale float32(coefficient / √rank); the rank of dense noise is 1.

    Those whose scale is 0 are left out: they change no bit (-0.0 too).
    """
    scaled = [(term.seed, float(np.float32(term.coefficient / math.sqrt(rank)))) for term in terms]
    kept = [(seed, scale) for seed, scale in scaled if scale]
    seeds_S = torch.tensor([seed for seed, _ in kept], dtype=torch.int64, device=device)
    return seeds_S, torch.tensor([scale for _, scale in kept], dtype=torch.float32, device=device)


def add_dense_(
    weight: torch.Tensor,
    name: str,
    terms: DeviceTerms,
    kind: NoiseKind = "gaussian",
    part: Part | None = None,
    partitions: Partitions = UNDIVIDED,
) -> None:
    """Add scale · ε(seed, name) to W, for each term in order, as `FullRankSpace` does.

    W is float32, contiguous or with two axes. Each term is added to the runs of its
    group of a partition.

    Raises:
        ValueError: A kind, a part or a tensor that does not fit.
    """
    part, rows = _as_rows(weight, part)
    if rows.stride(1) > _MAX_STRIDE:
        raise ValueError(f"neighbours in a row may be at most {_MAX_STRIDE} elements apart")
    runs = _part_runs(part)
    if runs.num_runs == 1 and weight.is_contiguous():
        rows = weight.view(1, -1)
    else:
        runs = _Runs(runs.start, part.width, *part.shape)
    if weight.numel() == 0 or len(terms[0]) == 0:
        return
    num_programs, tiling, settings = _tiles_of(runs, kind)
    launch(
        programs.dense_program,
        (num_programs,),
        rows,
        _table(weight.device),
        *terms,
        len(terms[0]),
        _key_of(name),
        *tiling,
        *rows.stride(),
        _key_of(partition_name(name)),
        partitions.number,
        DIVIDED=partitions.number > 1,
        **settings,
    )


def add_low_rank_(
    weight: torch.Tensor,
    name: str,
    terms: DeviceTerms,
    rank: int,
    kind: NoiseKind = "gaussian",
    part: Part | None = None,
) -> None:
    """Add (scale * A[:, k])[:, None] * B[:, k][None, :] to W, as `LowRankSpace` adds terms.

    For each term in order, and for each k in it. The factors of as many terms as fit into 64 MiB
    are generated first, each number once; then all of these are added to every element of W, which
    is float32 of two axes (out, in), any strides. The factors are noise of `name` + ".A" and ".B".

    Raises:
        ValueError: A kind, a part or a tensor that does not fit.
    """
    part, weight = _as_rows(weight, part)
    num_rows, num_columns = part.shape
    if weight.numel() == 0:
        return
    at_once = FACTORS_AT_ONCE // (rank * (num_rows + num_columns))
    at_once = max(1, min(at_once, _MAX_GRID))
    tiles_down, tiles_across = -(-num_rows // _TILE_ROWS), -(-num_columns // _TILE_COLUMNS)
    for seeds_S, scales_S in zip(*(each.split(at_once) for each in terms), strict=True):
        if len(seeds_S) == 0:
            return
        columns_S = weight.new_empty(len(seeds_S), rank, num_rows)
        rows_S = weight.new_empty(len(seeds_S), rank, num_columns)
        # One term an entry, each in its own place.
        places = torch.arange(len(seeds_S), device=weight.device)
        of_terms = (each.view(1, -1, 1) for each in (seeds_S, scales_S))
        entries = _Entries(places, torch.zeros_like(places), *of_terms, is_dense=False)
        a, b = (Part(rows, (0, rank), rank) for rows in (part.rows, part.columns))
        jobs = [Job(columns_S.mT, f"{name}.A", a), Job(rows_S.mT, f"{name}.B", b, scaled=False)]
        fill(jobs, entries, kind)
        launch(
            programs.rank_one_program,
            (tiles_down * tiles_across,),
            weight,
            columns_S,
            rows_S,
            len(seeds_S) * rank,
            num_rows,
            num_columns,
            tiles_across,
            *weight.stride(),
            ROWS=_TILE_ROWS,
            COLUMNS=_TILE_COLUMNS,
        )


# All factors of all genomes of a block are written where they sample from by one launch: a model
# has hundreds of weights and a block dozens of genomes, so a launch for each would take far longer
# than the noise does. One grid has all tiles of all factors along its first axis and all genomes
# along its second; a table says which tensor a tile belongs to, and where that is.


class _Entries(NamedTuple):
    """Entries to write, on a device: each is a genome, or one term of a low-rank genome.

    Attributes:
        places: int64, where in the tensors.
        shifts: int64, by how many columns it is shifted.
        seeds: int64, (kinds of parameters, entries, terms); parameters of one kind have the same
            share of all terms.
        scales: float32, of these; a scale of 0 stands where there is no term.
        is_dense: they are added to the centre; else each entry is one low-rank term.
    """

    places: torch.Tensor
    shifts: torch.Tensor
    seeds: torch.Tensor
    scales: torch.Tensor
    is_dense: bool


@dataclasses.dataclass(frozen=True)
class Job:
    """One tensor to be written.

    Attributes:
        out: (places, rows, columns), any strides; it has to stay where it is until it is written.
        name: name of the parameter whose noise it has.
        part: part of that parameter that it holds; for low-rank terms, that of one term.
        scaled: whether low-rank noise is multiplied by the term's scale.
        centre: dense noise is added to this, (rows, columns) in float32, any strides.
        factor: factor on centre and noise together.
        kind: first index of the entries' seeds.
    """

    out: torch.Tensor
    name: str
    part: Part
    scaled: bool = True
    centre: torch.Tensor | None = None
    factor: float = 1.0
    kind: int = 0


def entries_of(
    terms_of: Sequence[Sequence[Sequence[Term]]],
    places_G: Sequence[int],
    device: torch.device,
    rank: int | None = None,
) -> _Entries:
    """Make entries of genomes at these places: centre + Σ coefficient · ε(seed), or low-rank terms.

    Args:
        terms_of: each genome's terms, by kind of parameter; shorter lists are padded with zeros.
        places_G: place of each genome.
        device: device of the entries.
        rank: rank of low-rank terms, else None; term t is shifted by t · rank columns.
    """
    num_terms = max((len(terms) for of_kind in terms_of for terms in of_kind), default=0)
    places, shifts = list(places_G), [0] * len(places_G)
    if rank is not None:
        places = [place for place in places for _ in range(num_terms)]
        shifts = [t * rank for _ in places_G for t in range(num_terms)]
        columns = range(num_terms)
        terms_of = [[own[t : t + 1] for own in of_kind for t in columns] for of_kind in terms_of]
        num_terms = 1
    num_terms, nothing = max(1, num_terms), Term(0, 0.0)
    shape = len(terms_of), len(places), num_terms
    flat = [
        term
        for of_kind in terms_of
        for terms in of_kind
        for term in (*terms, *[nothing] * (num_terms - len(terms)))
    ]
    scales = np.array([term.coefficient for term in flat], np.float64) / math.sqrt(rank or 1)
    return _Entries(
        torch.tensor(places, dtype=torch.int64, device=device),
        torch.tensor(shifts, dtype=torch.int64, device=device),
        torch.tensor([term.seed for term in flat], dtype=torch.int64).view(shape).to(device),
        torch.from_numpy(scales.astype(np.float32)).view(shape).to(device),
        rank is None,
    )


def fill(jobs: Sequence[Job], entries: _Entries, noise: NoiseKind = "gaussian") -> None:
    """Write all entries of all jobs; everything else stays as it is.

    One launch, if all tensors have one dtype.
    """
    if not len(entries.places):
        return
    for dtype in {job.out.dtype: None for job in jobs}:
        of_dtype = [job for job in jobs if job.out.dtype == dtype and job.part.num_elements]
        if of_dtype:
            _fill(of_dtype, entries, noise)


def _fill(jobs: Sequence[Job], entries: _Entries, noise: NoiseKind) -> None:
    device = entries.places.device
    runs_of_jobs = [_part_runs(job.part) for job in jobs]
    # All tiles are of one size, that of the job with the largest.
    blocks = max(cast("int", _tiles_of(runs, noise)[2]["BLOCKS"]) for runs in runs_of_jobs)
    tiles: list[int] = []
    numbers: list[list[int]] = []
    settings: dict[str, object] = {}
    first_tile = 0
    for job, runs in zip(jobs, runs_of_jobs, strict=True):
        num_tiles, tiling, settings = _tiles_of(runs, noise, blocks)
        centre = job.centre
        numbers.append(
            [
                *(job.out.data_ptr(), *job.out.stride()),
                *((0, 0, 0) if centre is None else (centre.data_ptr(), *centre.stride())),
                *(int(job.scaled), first_tile, _key_of(job.name), *tiling),
                *(job.part.shape[1], job.kind),
            ]
        )
        tiles.append(num_tiles)
        first_tile += num_tiles
    _, num_entries, num_terms = entries.seeds.shape
    launch(
        programs.slots_program,
        (first_tile, num_entries),
        torch.tensor(numbers, dtype=torch.int64).to(device),
        torch.from_numpy(np.repeat(np.arange(len(jobs)), tiles)).to(device),
        torch.tensor([job.factor for job in jobs], dtype=torch.float32).to(device),
        _table(device),
        *entries[:4],
        num_entries,
        num_terms,
        SIZE=len(numbers[0]),
        DTYPE=getattr(programs.tl, str(jobs[0].out.dtype).removeprefix("torch.")),
        DENSE=entries.is_dense,
        **settings,
    )
