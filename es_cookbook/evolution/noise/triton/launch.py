"""From tensors to Triton programs: which elements a tensor holds, how they are tiled, the launch.

A tensor may hold a whole parameter or a part of one (a tensor-parallel shard), as its `Part` says.
Its elements are then runs of neighbours in the parameter, and each run is divided into tiles of
whole Philox blocks, one program per tile.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.noise import gaussian, philox
from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.noise.tensors import GAUSSIANS_PER_BLOCK, SIGNS_PER_BLOCK, NoiseKind
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


def launch_noise(
    out: torch.Tensor,
    strides: tuple[int, int, int, int],
    runs: Runs,
    name: str,
    kind: NoiseKind,
    seeds_S: torch.Tensor,
    scales_S: torch.Tensor | None = None,
    width: int = 0,
) -> None:
    """Start `noise_program`: every seed's noise, times its scale if there are any.

    `strides` are those of seeds, of runs, of elements, and within an element's `width`: that of a
    row where a run is a matrix, 0 where it is not.
    """
    num_programs, tiling, settings = tiles_of(runs, kind)
    launch(
        programs.noise_program,
        (num_programs, len(seeds_S)),
        out,
        table(out.device),
        seeds_S,
        scales_S,
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
    on_device = torch.from_numpy(gaussian.table().copy()).to(device)
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
