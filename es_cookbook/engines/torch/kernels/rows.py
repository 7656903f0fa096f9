"""Kernels over rows: RMSNorms, gated layers, and the low-rank parts of each row's genome."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    LANES,
    ONE,
    ZERO,
    Lanes,
    Number,
    Row,
    add,
    divide,
    exponential,
    fma,
    kernel,
    load,
    multiply,
    read,
    spread,
    store,
    sum_of,
    write,
)

RankFactors: TypeAlias = tuple[
    NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], int
]
"""Low-rank parts of genomes, and the genome of each block of rows.

a_G_R_N (genomes, ranks, at least as many columns as outputs); b_G_R_N (genomes, ranks, inputs);
first column, and one past the last, that each rank adds to, columns_R (ranks, 2); the genome of
each block of rows, empty where nothing is to be added; rows of a block.
"""
FACTORS = "Tuple((float32[:,:,::1], float32[:,:,::1], int64[:,::1], int64[::1], int64))"
"""These, in numba's words."""

# Arrays have one axis here, and come with where a row of them begins: a view of a row would count
# references, which costs more than many a row's work.


@kernel()
def product(x: Row, at: int, y: Row, other: int, size: int) -> Number:
    """Return the inner product of two rows of `size` numbers."""
    whole = size // (2 * LANES) * (2 * LANES)
    even = odd = spread(ZERO)
    for i in range(0, whole, 2 * LANES):
        even = fma(load(x, at + i), load(y, other + i), even)
        odd = fma(load(x, at + i + LANES), load(y, other + i + LANES), odd)
    total = sum_of(add(even, odd))
    for i in range(whole, size):
        total += read(x, at + i) * read(y, other + i)
    return total


@kernel()
def _with_multiple(
    y: Row, factor: Number, x: Row, out: Row, places: tuple[int, int, int], size: int
) -> None:
    """Write y + factor · x for rows of `size` numbers, at their places; out may be y itself."""
    of_y, of_x, to = places
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, to + i, fma(many, load(x, of_x + i), load(y, of_y + i)))
    for i in range(whole, size):
        out[to + i] = read(y, of_y + i) + factor * x[of_x + i]


@kernel()
def widen_row(y: Row, at: int, size: int, out: Row, to: int) -> None:
    """Write a row in float32."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(out, to + i, load(y, at + i))
    for i in range(whole, size):
        out[to + i] = read(y, at + i)


_ROWS = 4
"""Rows that a genome's factor is multiplied with together."""


@kernel()
def rank_factors(
    x_T_N: Row,
    b_G_R_N: NDArray[np.float32],
    ranks: int,
    genome_of_block: NDArray[np.int64],
    height: int,
) -> Row:
    """Return each row's factors for its genome's ranks, x Bᵀ: (rows · ranks,)."""
    rows, inputs = x_T_N.shape
    x, b = x_T_N.reshape(-1), b_G_R_N.reshape(-1)
    out = np.empty(max(1, rows * ranks), np.float32)
    whole = inputs // LANES * LANES
    for block in range(len(genome_of_block)):
        genome = genome_of_block[block] * b_G_R_N.shape[1]
        last = (block + 1) * height - 1
        for r in range(ranks):
            of_b = (genome + r) * inputs
            for t in range(block * height, last + 1, _ROWS):
                # Beyond the block's last row, that row again.
                t1, t2, t3 = min(t + 1, last), min(t + 2, last), min(t + 3, last)
                x0, x1, x2, x3 = t * inputs, t1 * inputs, t2 * inputs, t3 * inputs
                lanes0 = lanes1 = lanes2 = lanes3 = spread(ZERO)
                for i in range(0, whole, LANES):
                    factor = load(b, of_b + i)
                    lanes0 = fma(load(x, x0 + i), factor, lanes0)
                    lanes1 = fma(load(x, x1 + i), factor, lanes1)
                    lanes2 = fma(load(x, x2 + i), factor, lanes2)
                    lanes3 = fma(load(x, x3 + i), factor, lanes3)
                s0, s1, s2, s3 = sum_of(lanes0), sum_of(lanes1), sum_of(lanes2), sum_of(lanes3)
                for i in range(whole, inputs):
                    rest = read(b, of_b + i)
                    s0 += read(x, x0 + i) * rest
                    s1 += read(x, x1 + i) * rest
                    s2 += read(x, x2 + i) * rest
                    s3 += read(x, x3 + i) * rest
                write(out, t * ranks + r, s0)
                write(out, t1 * ranks + r, s1)
                write(out, t2 * ranks + r, s2)
                write(out, t3 * ranks + r, s3)
    return out


@kernel()
def tiles(columns_R: NDArray[np.int64], outputs: int) -> bool:
    """Return whether the ranks' columns follow each other and cover all outputs."""
    end = 0
    for r in range(len(columns_R)):
        if columns_R[r, 0] != end:
            return False
        end = columns_R[r, 1]
    return end == outputs


@kernel()
def add_ranks(
    y: Row,
    factors: Row,
    a: Row,
    columns_R: NDArray[np.int64],
    out: Row,
    places: tuple[int, int, int, int],
    sizes: tuple[int, int, bool],
) -> None:
    """Write y + a row's low-rank part: its factors times the ranks of its genome.

    Args:
        y: outputs to add to.
        factors: as `rank_factors` returns them.
        a: ranks.
        columns_R: column of each rank.
        out: written.
        places: places of the row's in y, factors, ranks and out.
        sizes: outputs, how far apart ranks lie, and what `tiles` says.
    """
    of_y, of_factors, of_a, to = places
    outputs, stride, tiled = sizes
    if not tiled:
        widen_row(y, of_y, outputs, out, to)
    for r in range(len(columns_R)):
        first, size = columns_R[r, 0], columns_R[r, 1] - columns_R[r, 0]
        factor, rank = read(factors, of_factors + r), of_a + r * stride + first
        if tiled:
            _with_multiple(y, factor, a, out, (of_y + first, rank, to + first), size)
        else:
            _with_multiple(out, factor, a, out, (to + first, rank, to + first), size)


def of_rows(signature: str) -> list[str]:
    """Return a signature for rows of each dtype."""
    return [signature.format(rows=rows, factors=FACTORS) for rows in ("float32", "uint16")]


@kernel(of_rows("void({rows}[:,::1], {rows}[:,::1], {factors}, float32[:,::1])"))
def add_low_rank(
    y_T_N: Row, x_T_N: Row, factors: RankFactors, out_T_N: NDArray[np.float32]
) -> None:
    """Add each row's genome's low-rank part: out = y + (x Bᵀ) A.

    Args:
        y_T_N: (rows, outputs).
        x_T_N: (rows, inputs).
        factors: A and B, and whose the rows are.
        out_T_N: written; it may be y.
    """
    a_G_R_N, b_G_R_N, columns_R, genome_of_block, height = factors
    outputs, ranks = y_T_N.shape[1], len(columns_R)
    of_genome, stride = a_G_R_N.shape[1] * a_G_R_N.shape[2], a_G_R_N.shape[2]
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    of_rows = rank_factors(x_T_N, b_G_R_N, ranks, genome_of_block, height)
    sizes = outputs, stride, tiles(columns_R, outputs)
    for t in range(len(y_T_N)):
        at, of_a = t * outputs, genome_of_block[t // height] * of_genome
        add_ranks(y, of_rows, a, columns_R, out, (at, t * ranks, of_a, at), sizes)


@kernel()
def _gated(gate: Lanes, up: Lanes) -> Lanes:
    """Return SiLU(gate) · up."""
    below = add(exponential(multiply(gate, spread(-ONE))), spread(ONE))
    return multiply(divide(gate, below), up)


@kernel(of_rows("void({rows}[:,::1], {rows}[:,::1], {factors}, {rows}[:,::1])"))
def silu_and_multiply(y_T_N: Row, x_T_N: Row, factors: RankFactors, out_T_N: Row) -> None:
    """Add low-rank parts as `add_low_rank`; out = SiLU(first half) · second half, n at least 16.

    A rank adds to the one half or to the other, those of the first before those of the second.
    """
    a_G_R_N, b_G_R_N, columns_R, genome_of_block, height = factors
    size, stride = out_T_N.shape[1], a_G_R_N.shape[2]
    ranks = len(columns_R) if len(genome_of_block) else 0
    of_gate = 0
    for r in range(ranks):
        of_gate += columns_R[r, 0] < size
    of_rows = rank_factors(x_T_N, b_G_R_N, ranks, genome_of_block, height)
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    of_a = 0
    for t in range(len(out_T_N)):
        if ranks:
            of_a = genome_of_block[t // height] * a_G_R_N.shape[1] * stride
        of_y, of_out = t * 2 * size, t * size
        if ranks == 2 and of_gate == 1:  # as below, without loops of one round
            of_gate_0, of_up_0 = spread(read(of_rows, 2 * t)), spread(read(of_rows, 2 * t + 1))
            of_up = of_a + stride + size
            for step in range(0, size, LANES):
                i = min(step, size - LANES)
                gate = fma(of_gate_0, load(a, of_a + i), load(y, of_y + i))
                up = fma(of_up_0, load(a, of_up + i), load(y, of_y + size + i))
                store(out, of_out + i, _gated(gate, up))
            continue
        for step in range(0, size, LANES):
            i = min(step, size - LANES)  # the last ones with some of those before them
            gate, up = load(y, of_y + i), load(y, of_y + size + i)
            for r in range(of_gate):
                factor = spread(read(of_rows, t * ranks + r))
                gate = fma(factor, load(a, of_a + r * stride + i), gate)
            for r in range(of_gate, ranks):
                factor = spread(read(of_rows, t * ranks + r))
                up = fma(factor, load(a, of_a + r * stride + size + i), up)
            store(out, of_out + i, _gated(gate, up))


@kernel()
def norm_row(x: Row, at: int, size: int, weight: Row, epsilon: Number, out: Row, to: int) -> None:
    """Write x / sqrt(mean of x² + epsilon) · weight, of a row; out may be x itself."""
    whole = size // LANES * LANES
    mean = product(x, at, x, at, size) / np.float32(size)
    factor = ONE / np.sqrt(mean + epsilon)
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, to + i, multiply(multiply(load(x, at + i), many), load(weight, i)))
    for i in range(whole, size):
        out[to + i] = x[at + i] * factor * weight[i]


@kernel("void(float32[:,::1], float32[::1], float32, float32[:,::1])")
def rms_norm(x_T_N: Row, weight_N: Row, epsilon: float, out_T_N: Row) -> None:
    """Write x / sqrt(mean of x² + epsilon) · weight, a row at a time."""
    size = x_T_N.shape[1]
    x, out = x_T_N.reshape(-1), out_T_N.reshape(-1)
    for t in range(len(x_T_N)):
        norm_row(x, t * size, size, weight_N, epsilon, out, t * size)
