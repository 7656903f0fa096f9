"""The Triton programs: Philox words, noise, and noise added to weights.

`es_cookbook.evolution.noise.triton_kernels` launches them and documents their use; this module is
only what one program does. The steps are those of the NumPy definition: `philox` makes the four
words of a block (block b is the published function at counter b + 1, see
`es_cookbook.evolution.noise`), `_noise` spreads them over the block's elements.

One program computes a *tile* of whole blocks, because Philox generates a block at once. Requested
are runs of `length` elements; run i begins at element `start + i * pitch`: one run for a
range, one per row for a region of a matrix. Runs may begin and end in the middle of a block; the
rest of a tile is masked.

Exact arithmetic: every product and every sum is rounded to float32 separately. A compiler may fuse
`a * b + c` into one instruction that rounds once, and whether Triton lets it depends on its version
(the default changes from 3.9 to 3.10) and on environment variables. So products and sums are
written in PTX with a rounding modifier, `mul.rn.f32` and `add.rn.f32`: by the definition of PTX
these are never contracted and, without `.ftz`, keep subnormal numbers. libdevice's `mul_rn` is not
an alternative, because Triton makes it flush them. Triton's interpreter has no PTX; it runs on
NumPy, which rounds after every operation.
"""

# Annotations stay text, in which Triton finds the word constexpr: without it they have no values.
from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from es_cookbook.evolution.noise import RUN, SEEDS_OF_PARTITION

HAVE_TRITON = importlib.util.find_spec("triton") is not None
"""Without Triton, as in torch for the CPU, this module can be imported, but nothing in it run."""

if TYPE_CHECKING:
    # Triton's own types say what its Python functions return, which is not what programs compute.
    triton: Any = None
    tl: Any = None
    tensor: TypeAlias = Any
    constexpr: TypeAlias = Any
elif HAVE_TRITON:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor

_F = TypeVar("_F", bound=Callable[..., object])

_ANY_VALUE = (
    *("key", "num_terms", "num_updates", "num_entries", "tiles_across"),
    *("partition_key", "num_partitions"),
)
"""Arguments that are not worth another compilation when they are 1 or a multiple of 16."""


def _jit(function: _F) -> _F:
    """Apply `triton.jit`, typed as the function itself."""
    if not HAVE_TRITON:
        return function
    return cast(_F, triton.jit(function, do_not_specialize=_ANY_VALUE))


@_jit
def philox(
    c0: tensor, c1: tensor, c2: tensor, c3: tensor, k0: tensor, k1: tensor
) -> tuple[tensor, tensor, tensor, tensor]:
    """Compute Philox4x64-10 (Salmon et al. 2011): uint64 counter and key to a block of words."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2E7470EE14C6C93)
        low0 = c0 * 0xD2E7470EE14C6C93
        high1 = tl.umulhi(c2, 0xCA5A826395121157)
        low1 = c2 * 0xCA5A826395121157
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B97F4A7C15
        k1 = k1 + 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@_jit
def _noise(
    block: tensor, seed: tensor, key: tensor, table: tensor, GAUSSIAN: constexpr, LANES: constexpr
) -> tensor:
    """Return noise of whole blocks, one after the other: float32, LANES for each."""
    lanes = _lanes(block, seed, key, LANES)
    return tl.load(table + lanes) if GAUSSIAN else tl.where(lanes == 0, -1.0, 1.0)


@_jit
def _lanes(block: tensor, seed: tensor, key: tensor, LANES: constexpr) -> tensor:
    """Return the words of whole blocks in order, cut into LANES whole numbers for each."""
    counter = (block + 1).to(tl.uint64, bitcast=True)
    zero = counter * 0
    k0 = seed.to(tl.int64).to(tl.uint64, bitcast=True)
    k1 = key.to(tl.int64).to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = philox(counter, zero, zero, zero, k0, k1)
    # Joining adds a last axis of two, so this is w0, w1, w2, w3 in order.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (block.shape[0], 4, 1))
    shifts = (tl.arange(0, LANES // 4) * (256 // LANES)).to(tl.uint64)
    lanes = (words >> shifts[None, None, :]) & (2 ** (256 // LANES) - 1)
    return tl.reshape(lanes, (block.shape[0] * LANES,)).to(tl.int32)


@_jit
def _tile(
    tile: tensor,
    start: tensor,
    pitch: tensor,
    length: tensor,
    tiles_across: tensor,
    LANES: constexpr,
    BLOCKS: constexpr,
) -> tuple[tensor, tensor, tensor, tensor]:
    """Return the elements of this tile: BLOCKS blocks of one run.

    Returns:
        The numbers of its blocks; its run; the position in that run of its first element, not
        positive in a run's first tile; and which of its elements are asked for.
    """
    run = (tile // tiles_across).to(tl.int64)
    run_start = start + run * pitch
    first_block = run_start // LANES + tile % tiles_across * BLOCKS
    position = first_block * LANES - run_start
    # Numbers that count elements of a tile are small, and half the work in 32 bits.
    element = tl.arange(0, BLOCKS * LANES)
    stop = tl.minimum(length - position, BLOCKS * LANES).to(tl.int32)
    asked = (element >= tl.maximum(-position, 0).to(tl.int32)) & (element < stop)
    return first_block + tl.arange(0, BLOCKS), run, position, asked


@_jit
def _run_groups(first: tensor, partition: tensor, key: tensor, num_partitions: tensor) -> tensor:
    """Return the groups of the run that has element `first`, and of the run behind it."""
    run = first // _RUN + tl.arange(0, 2)
    lanes = tl.reshape(_lanes(run // 16, partition, key, 16), (2, 16))
    own = tl.arange(0, 16)[None, :] == (run % 16)[:, None]
    return tl.sum(tl.where(own, lanes, 0), axis=1).to(tl.int64) * num_partitions >> 16


@_jit
def _times(a: tensor, b: tensor) -> tensor:
    """Return the product, rounded to float32 separately."""
    if INTERPRETED:
        product = a * b
    else:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1
        )
    return product


@_jit
def _plus(a: tensor, b: tensor) -> tensor:
    """Return the sum, rounded to float32 separately."""
    if INTERPRETED:
        total = a + b
    else:
        total = tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1
        )
    return total


if HAVE_TRITON:
    _RUN, _SEEDS_OF_PARTITION = tl.constexpr(RUN), tl.constexpr(SEEDS_OF_PARTITION)
    INTERPRETED = tl.constexpr(not isinstance(_plus, triton.JITFunction))
    """Whether this process was asked, by TRITON_INTERPRET=1, to run programs on the CPU."""


@_jit
def _rounded(value: tensor, dtype: constexpr) -> tensor:
    """Round float32 to another dtype, to the nearest and to even, as torch and the GPU do."""
    if dtype == tl.bfloat16:
        # In integers, because the interpreter only cuts the lower half off.
        bits = value.to(tl.uint32, bitcast=True)
        upper = bits >> 16
        lower = bits & 0xFFFF
        up = (lower > 0x8000) | ((lower == 0x8000) & ((upper & 1) == 1))
        upper = tl.where(value == value, upper + up.to(tl.uint32), upper | 0x40)
        result = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result


@_jit
def dense_program(
    weight: tensor,
    table: tensor,
    seeds: tensor,
    scales: tensor,
    num_terms: tensor,
    key: tensor,
    start: tensor,
    pitch: tensor,
    length: tensor,
    tiles_across: tensor,
    run_stride: tensor,
    stride: tensor,
    partition_key: tensor,
    num_partitions: tensor,
    GAUSSIAN: constexpr,
    LANES: constexpr,
    BLOCKS: constexpr,
    DIVIDED: constexpr,
) -> None:
    """Add Σ scale * noise over the terms to W, in order.

    Where it is DIVIDED, a term changes the runs of its group alone; its noise is made only there.
    """
    block, run, position, asked = _tile(
        tl.program_id(0), start, pitch, length, tiles_across, LANES, BLOCKS
    )
    at = weight + run * run_stride + position * stride + tl.arange(0, BLOCKS * LANES) * stride
    values = tl.load(at, mask=asked, other=0.0)
    first = start + run * pitch + position
    is_in_next = first % _RUN + tl.arange(0, BLOCKS * LANES) >= _RUN
    for t in range(num_terms):
        seed = tl.load(seeds + t)
        if DIVIDED:
            group = seed % _SEEDS_OF_PARTITION % num_partitions
            partition = seed // _SEEDS_OF_PARTITION
            are_own = _run_groups(first, partition, partition_key, num_partitions) == group
            which = tl.arange(0, 2)
            has_first = tl.sum(tl.where(which == 0, are_own, False).to(tl.int32)) == 1
            has_next = tl.sum(tl.where(which == 1, are_own, False).to(tl.int32)) == 1
            if has_first | has_next:
                noise = _noise(block, seed, key, table, GAUSSIAN, LANES)
                moved = _plus(values, _times(noise, tl.load(scales + t)))
                values = tl.where(tl.where(is_in_next, has_next, has_first), moved, values)
        else:
            noise = _noise(block, seed, key, table, GAUSSIAN, LANES)
            values = _plus(values, _times(noise, tl.load(scales + t)))
    tl.store(at, values, mask=asked)


@_jit
def slots_program(
    jobs: tensor,
    job_of_tile: tensor,
    factors: tensor,
    table: tensor,
    places: tensor,
    shifts: tensor,
    seeds: tensor,
    scales: tensor,
    num_entries: tensor,
    num_terms: tensor,
    SIZE: constexpr,
    DTYPE: constexpr,
    DENSE: constexpr,
    GAUSSIAN: constexpr,
    LANES: constexpr,
    BLOCKS: constexpr,
) -> None:
    """Write many tensors' noise for many genomes: the grid has all jobs' tiles, and entries.

    A job is a tensor (places, rows, columns), given by its address and strides, that holds part of
    a parameter: SIZE numbers, whose order is in `kernels`. An entry writes to its own place,
    with columns shifted by so many; `seeds` and `scales` are (kinds, entries, terms).

    DENSE: factor * (centre + Σ scale * noise); terms whose scale is 0 leave every bit. Otherwise
    there is one term, and a job's scale * noise, or its noise alone.
    """
    tile = tl.program_id(0)
    entry = tl.program_id(1)
    number = tl.load(job_of_tile + tile)
    job = jobs + number * SIZE
    out = tl.load(job).to(tl.pointer_type(DTYPE))
    key = tl.load(job + 9)
    start = tl.load(job + 10)
    pitch = tl.load(job + 11)
    width = tl.load(job + 14)
    block, run, position, asked = _tile(
        tile - tl.load(job + 8).to(tl.int32),
        start,
        pitch,
        tl.load(job + 12),
        tl.load(job + 13).to(tl.int32),
        LANES,
        BLOCKS,
    )
    # Where a run is many rows, its elements' rows and columns; the division is in 32 bits.
    begin = tl.maximum(position, 0)
    beside = tl.arange(0, BLOCKS * LANES) + (begin % width + position - begin).to(tl.int32)
    row = run + begin // width + beside // width.to(tl.int32)
    column = beside % width.to(tl.int32)
    term = (tl.load(job + 15) * num_entries + entry) * num_terms
    if DENSE:
        centre = tl.load(job + 4).to(tl.pointer_type(tl.float32))
        source = centre + row * tl.load(job + 5) + column * tl.load(job + 6)
        values = tl.load(source, mask=asked, other=0.0)
        for t in range(num_terms):
            scale = tl.load(scales + term + t)
            noise = _noise(block, tl.load(seeds + term + t), key, table, GAUSSIAN, LANES)
            values = tl.where(scale == 0, values, _plus(values, _times(noise, scale)))
        values = _times(values, tl.load(factors + number))
    else:
        values = _noise(block, tl.load(seeds + term), key, table, GAUSSIAN, LANES)
        scale = tl.where(tl.load(job + 7) == 0, 1.0, tl.load(scales + term))
        values = _times(values, scale)
    column += tl.load(shifts + entry)
    place = tl.load(places + entry) * tl.load(job + 1)
    target = out + place + row * tl.load(job + 2) + column * tl.load(job + 3)
    tl.store(target, _rounded(values, DTYPE), mask=asked)


@_jit
def rank_one_program(
    weight: tensor,
    columns: tensor,
    rows: tensor,
    num_updates: tensor,
    num_rows: tensor,
    num_columns: tensor,
    tiles_across: tensor,
    row_stride: tensor,
    column_stride: tensor,
    ROWS: constexpr,
    COLUMNS: constexpr,
) -> None:
    """Add columns[n][:, None] * rows[n][None, :] to W, for each n in order, in place.

    `columns` is (updates, rows of W), `rows` is (updates, columns of W), both contiguous.
    """
    tile = tl.program_id(0)
    i = (tile // tiles_across * ROWS).to(tl.int64) + tl.arange(0, ROWS)
    j = (tile % tiles_across * COLUMNS).to(tl.int64) + tl.arange(0, COLUMNS)
    inside = (i < num_rows)[:, None] & (j < num_columns)[None, :]
    at = weight + i[:, None] * row_stride + j[None, :] * column_stride
    values = tl.load(at, mask=inside, other=0.0)
    for _ in range(num_updates):
        column = tl.load(columns + i, mask=i < num_rows, other=0.0)
        row = tl.load(rows + j, mask=j < num_columns, other=0.0)
        values = _plus(values, _times(column[:, None], row[None, :]))
        columns += num_rows
        rows += num_columns
    tl.store(at, values, mask=inside)
