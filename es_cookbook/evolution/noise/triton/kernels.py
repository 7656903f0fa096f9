"""The noise in Triton: generated on the GPU, where the weights are, bit for bit the same.

Noise is a pure function of (seed, name, element), so only seeds are sent to a GPU, and a shard of a
tensor generates just its part. There are four uses, and one more in `slots`: the factors of all
genomes, in the LoRA slots or tables that sample with them.

- `noise_into`: the noise itself;
- `perturbed_into`: cast(centre + Σ scale · noise), a full-rank genome's own weights;
- `add_dense_`, `add_low_rank_`: a step of the centre, as `FullRankSpace` and `LowRankSpace` move
  it: term after term in exact arithmetic, a weight read and written once for many terms.

`name` is the parameter's Hugging Face name, `kind` the noise's distribution, and `part` the part of
the parameter that a tensor holds; all of it if None. Terms are sent to the GPU once, for all
parameters:

    terms = low_rank_terms(step.terms, rank, device)
    for name, weight in weights.items():
        add_low_rank_(weight, name, terms)

The kernels are in `es_cookbook.evolution.noise.triton.programs`. They need Triton and an NVIDIA
GPU; with `TRITON_INTERPRET=1`, set before Triton is first imported, they run on the CPU instead,
slowly, which is how they are tested. Work is queued on the current stream without waiting.

A tensor may hold a whole parameter or a part of one (a tensor-parallel shard), as its `Part` says.
Its elements are then runs of neighbours in the parameter, and each run is divided into tiles of
whole Philox blocks, one program per tile.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import philox
from es_cookbook.evolution.noise.tensors import (
    GAUSSIANS_PER_BLOCK,
    SIGNS_PER_BLOCK,
    Mask,
    NoiseKind,
    Part,
    check_seed,
    mask_name,
)
from es_cookbook.evolution.noise.triton import programs

MAX_GRID = 2**16 - 1
"""Programs along any but the first axis of a CUDA grid."""
_LANES = {"gaussian": GAUSSIANS_PER_BLOCK, "rademacher": SIGNS_PER_BLOCK}
_TILE_BLOCKS = {"gaussian": 128, "rademacher": 16}
"""Blocks that a program makes at most: 2,048 and 4,096 elements."""
_MAX_STRIDE = 2**19
"""Between neighbours in memory: offsets within a tile are 32-bit numbers."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Runs(NamedTuple):
    """Elements of a parameter: `num_runs` runs of `length`, run i from `start + i * pitch` on."""

    start: int
    pitch: int
    num_runs: int
    length: int


def as_rows(part: Part | None, *tensors: torch.Tensor) -> tuple[Part, list[torch.Tensor]]:
    """The part that tensors of one shape hold, a whole parameter if None, and views as its rows.

    Raises:
        ValueError: They do not hold this part, or not in rows and columns.
    """
    part = part or Part.whole(tuple(tensors[0].shape))
    try:
        return part, [tensor.view(part.shape) for tensor in tensors]
    except RuntimeError:
        raise ValueError(
            f"a tensor of shape {tuple(tensors[0].shape)} does not hold {part}: it needs "
            f"{part.num_elements} elements, contiguous or with two axes"
        ) from None


def runs_of(part: Part | None, *tensors: torch.Tensor) -> tuple[Runs, list[torch.Tensor]]:
    """The elements that tensors of one shape hold, and each of the tensors as (runs, length).

    Raises:
        ValueError: They do not hold this part, or not in rows and columns.
    """
    part, rows = as_rows(part, *tensors)
    if any(tensor.stride(1) > _MAX_STRIDE for tensor in rows):
        raise ValueError(f"neighbours in a row may be at most {_MAX_STRIDE} elements apart")
    runs = part_runs(part)
    if runs.num_runs == 1 and all(tensor.is_contiguous() for tensor in tensors):
        return runs, [tensor.view(1, -1) for tensor in rows]
    return Runs(runs.start, part.width, *part.shape), rows


def part_runs(part: Part) -> Runs:
    """A part's elements, in as few runs as can be."""
    start = part.rows[0] * part.width + part.columns[0]
    if part.shape[1] == part.width:
        return Runs(start, 0, 1, part.num_elements)
    return Runs(start, part.width, *part.shape)


def tiles_of(
    runs: Runs, kind: NoiseKind, blocks: int | None = None
) -> tuple[int, tuple[int, int, int, int], dict[str, object]]:
    """How runs are tiled, in tiles of so many blocks, or as many as suit them if None.

    Returns:
        The number of programs, their arguments `start` ... `tiles_across`, and their settings.

    Raises:
        ValueError: There is no such noise.
    """
    if kind not in _LANES:
        raise ValueError(f"noise is 'gaussian' or 'rademacher', found {kind!r}")
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


def _launch_noise(
    out: torch.Tensor,
    strides: tuple[int, int, int, int],
    runs: Runs,
    name: str,
    kind: NoiseKind,
    terms_S: tuple[torch.Tensor, torch.Tensor | None],
    width: int = 0,
) -> None:
    """Start `noise_program`: every seed's noise, times its scale if there are any.

    `strides` are those of seeds, of runs, of elements, and within an element's `width`: that of a
    row where a run is a matrix, 0 where it is not.
    """
    num_programs, tiling, settings = tiles_of(runs, kind)
    launch(
        programs.noise_program,
        (num_programs, len(terms_S[0])),
        out,
        table(out.device),
        *terms_S,
        key_of(name),
        *tiling,
        *strides,
        WIDTH=width,
        **settings,
    )


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
def table(device: torch.device) -> torch.Tensor:
    """Q on a device."""
    on_device = torch.from_numpy(philox.normal_table().copy()).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # Other streams will read it too.
    return on_device


def key_of(name: str) -> int:
    """`philox.name_key` as a signed number of the same bits: Triton then always takes 64."""
    key = philox.name_key(name)
    return key - 2**64 if key >= 2**63 else key


def check_tensors(out: torch.Tensor, *others: torch.Tensor) -> None:
    """Check that a program can write `out` from these others.

    Raises:
        ConfigError: There is no Triton.
        ValueError: They are not on one CUDA device, or `out` has a dtype that is not written.
    """
    if not programs.HAVE_TRITON:
        raise ConfigError(
            "noise on CUDA is made by the package triton, which is not installed; on Linux, "
            "`pip install triton` installs it"
        )
    if not out.is_cuda and not programs.INTERPRETED:
        raise ValueError(f"the Triton twin needs tensors on CUDA, found one on {out.device}")
    if out.dtype not in _DTYPES:
        raise ValueError(f"noise is written as one of {_DTYPES}, found {out.dtype}")
    for other in others:
        if other.device != out.device:
            raise ValueError(
                f"tensors must be on one device, found {out.device} and {other.device}"
            )


_TILE_ROWS, _TILE_COLUMNS = 32, 128
"""Of a weight, for one program of rank-1 updates."""
FACTORS_AT_ONCE = 2**24
"""Numbers of factors that are held at once, 64 MiB; a weight is read and written once for these."""


class DeviceTerms(NamedTuple):
    """Terms on a device, as `dense_terms` and `low_rank_terms` make them.

    Attributes:
        seeds_S: int64.
        scales_S: float32: factors of the noise.
        rank: of the perturbation; None where the noise is dense.
    """

    seeds_S: torch.Tensor
    scales_S: torch.Tensor
    rank: int | None


def dense_terms(terms: Sequence[Term], device: torch.device) -> DeviceTerms:
    """Terms of dense noise, with scale float32(coefficient).

    Those whose scale is 0 are left out: they change no bit (-0.0 too).
    """
    return _on_device(terms, None, device)


def low_rank_terms(terms: Sequence[Term], rank: int, device: torch.device) -> DeviceTerms:
    """Terms of low-rank noise, with scale float32(coefficient / √rank), 0 left out too."""
    return _on_device(terms, rank, device)


def noise_into(
    out: torch.Tensor, seed: int, name: str, kind: NoiseKind = "gaussian", part: Part | None = None
) -> None:
    """Write ε(seed, name), cast to `out`'s dtype, to an `out` that is contiguous or has two axes.

    Raises:
        ValueError: A seed, kind, part or tensor that does not fit.
    """
    check_seed(seed)
    check_tensors(out)
    runs, (rows,) = runs_of(part, out)
    if out.numel() > 0:
        seeds_S = torch.full((1,), seed, dtype=torch.int64, device=out.device)
        strides = (0, rows.stride(0), rows.stride(1), 0)
        _launch_noise(rows, strides, runs, name, kind, (seeds_S, None))


def perturbed_into(
    out: torch.Tensor,
    centre: torch.Tensor,
    name: str,
    terms: DeviceTerms,
    kind: NoiseKind = "gaussian",
    part: Part | None = None,
    mask: Mask | None = None,
) -> None:
    """Write cast(centre + Σ scale · ε(seed, name)), term after term, cast once at the end.

    `out` has the centre's shape and any floating dtype of 16 bits or more, and may be the centre;
    the centre is float32; both are contiguous or have two axes. The terms are those of
    `dense_terms`, and are added to the elements of the mask; to all if None.

    Raises:
        ValueError: Terms, a kind, a part or tensors that do not fit.
    """
    if terms.rank is not None:
        raise ValueError("dense noise needs terms of dense_terms, found those of low_rank_terms")
    check_tensors(out, centre, terms.seeds_S)
    if centre.dtype != torch.float32 or centre.shape != out.shape:
        raise ValueError(
            f"the centre must be float32 of shape {tuple(out.shape)}, found {centre.dtype} of "
            f"shape {tuple(centre.shape)}"
        )
    runs, (target, source) = runs_of(part, out, centre)
    if out.numel() == 0:
        return
    num_programs, tiling, settings = tiles_of(runs, kind)
    launch(
        programs.dense_program,
        (num_programs,),
        target,
        source,
        table(out.device),
        terms.seeds_S,
        terms.scales_S,
        len(terms.seeds_S),
        key_of(name),
        *tiling,
        *target.stride(),
        *source.stride(),
        *((mask.seed, key_of(mask_name(name)), mask.threshold) if mask else (0, 0, 0)),
        MASKED=mask is not None,
        **settings,
    )


def add_dense_(
    weight: torch.Tensor,
    name: str,
    terms: DeviceTerms,
    kind: NoiseKind = "gaussian",
    part: Part | None = None,
    mask: Mask | None = None,
) -> None:
    """W <- W + scale · ε(seed, name), for each term in order, as `FullRankSpace` adds them.

    `perturbed_into` in place, with its arguments and its errors.
    """
    if terms.rank is not None or len(terms.seeds_S):
        perturbed_into(weight, weight, name, terms, kind, part, mask)


def add_low_rank_(
    weight: torch.Tensor,
    name: str,
    terms: DeviceTerms,
    kind: NoiseKind = "gaussian",
    part: Part | None = None,
) -> None:
    """W <- W + (scale * A[:, k])[:, None] * B[:, k][None, :], as `LowRankSpace` adds terms.

    For each term in order, and for each k in it. The factors of as many terms as fit into 64 MiB
    are generated first, each number once; then all of these are added to every element of W, which
    is float32 of two axes (out, in), any strides. The factors are noise of `name` + ".A" and ".B";
    the terms are those of `low_rank_terms`.

    Raises:
        ValueError: Terms, a kind, a part or a tensor that does not fit.
    """
    rank = _rank(terms)
    check_tensors(weight, terms.seeds_S)
    if weight.dtype != torch.float32:
        raise ValueError(f"exact arithmetic needs float32, found {weight.dtype}")
    part, (weight,) = as_rows(part, weight)
    num_rows, num_columns = part.shape
    if weight.numel() == 0:
        return
    at_once = FACTORS_AT_ONCE // (rank * (num_rows + num_columns))
    at_once = max(1, min(at_once, MAX_GRID))
    tiles_down, tiles_across = -(-num_rows // _TILE_ROWS), -(-num_columns // _TILE_COLUMNS)
    for first in range(0, len(terms.seeds_S), at_once):
        seeds_S = terms.seeds_S[first : first + at_once]
        scales_S = terms.scales_S[first : first + at_once]
        columns_S = weight.new_empty(len(seeds_S), rank, num_rows)
        rows_S = weight.new_empty(len(seeds_S), rank, num_columns)
        _factor_into(columns_S.mT, part.rows[0], f"{name}.A", kind, seeds_S, scales_S)
        _factor_into(rows_S.mT, part.columns[0], f"{name}.B", kind, seeds_S)
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


def _factor_into(
    out: torch.Tensor,
    first: int,
    name: str,
    kind: NoiseKind,
    seeds_S: torch.Tensor,
    scales_S: torch.Tensor | None = None,
) -> None:
    """Write rows `first` ... of every seed's factor into `out`: (seeds, rows, rank)."""
    num_rows, rank = out.shape[1:]
    if num_rows > 0 and len(seeds_S) > 0:
        runs = Runs(start=first * rank, pitch=0, num_runs=1, length=num_rows * rank)
        strides = (out.stride(0), 0, out.stride(1), out.stride(2))
        _launch_noise(out, strides, runs, name, kind, (seeds_S, scales_S), width=rank)


def _on_device(terms: Sequence[Term], rank: int | None, device: torch.device) -> DeviceTerms:
    divisor = 1.0 if rank is None else math.sqrt(rank)
    scaled = [(term.seed, float(np.float32(term.coefficient / divisor))) for term in terms]
    kept = [(seed, scale) for seed, scale in scaled if scale]
    seeds_S = torch.tensor([seed for seed, _ in kept], dtype=torch.int64, device=device)
    scales_S = torch.tensor([scale for _, scale in kept], dtype=torch.float32, device=device)
    return DeviceTerms(seeds_S, scales_S, rank)


def _rank(terms: DeviceTerms) -> int:
    if terms.rank is None:
        raise ValueError("low-rank noise needs terms of low_rank_terms, found those of dense_terms")
    return terms.rank
