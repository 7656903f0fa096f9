"""Loops that numba compiles for the CPU: gaussian noise, and rank-1 updates of a weight.

**Noise** of many seeds, or a long range of one. A population's factors are thousands of tensors of
a few hundred numbers, and setting NumPy's generator to a seed takes ten times as long as drawing
them. The words are the same, the published Philox4x64-10 (Salmon et al. 2011),
and index the same table.

**Rank-1 updates**: a step of the centre adds thousands of outer products to every weight, W <- W +
column · rowᵀ. An array library reads and writes W once or twice for each of them. Here all of them
are added to one tile of W while it is in the first cache, four in a pass, so only arithmetic
is left. It is exact: every product and every sum is rounded to float32 by itself, in the order
of the updates (`compiled` says why). LLVM works on several elements at once, which changes no bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from es_cookbook.evolution.noise.compiled import compiled

_Word: TypeAlias = np.uint64


def _high(_: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the upper half of the product of two words: one instruction, which Python lacks."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        double = ir.IntType(128)
        product = builder.mul(*(builder.zext(value, double) for value in values))
        return builder.trunc(builder.lshr(product, ir.Constant(double, 64)), ir.IntType(64))

    return types.uint64(a, b), emit


_high_half = cast("Callable[[_Word, _Word], _Word]", intrinsic(_high))

_M0, _M1 = _Word(0xD2E7470EE14C6C93), _Word(0xCA5A826395121157)
_W0, _W1 = _Word(0x9E3779B97F4A7C15), _Word(0xBB67AE8584CAA73B)
_LANE, _LANE_BITS = _Word(0xFFFF), 16
_ZERO, _ONE = _Word(0), _Word(1)
_TABLE = types.Array(types.float32, 1, "C", readonly=True)


@compiled(types.void(types.uint64[::1], types.uint64, types.int64, _TABLE, types.float32[:, ::1]))
def draw(
    seeds_S: NDArray[np.uint64],
    key: _Word,
    start: int,
    table: NDArray[np.float32],
    out_S: NDArray[np.float32],
) -> None:
    """Write elements `start` ... of each seed's gaussian noise.

    Args:
        seeds_S: 0 ... 2^63 - 1 each.
        key: key of the name (`noise.name_key`).
        start: 0 ... 2^63 - 1.
        table: table of normal quantiles.
        out_S: (seeds, elements).
    """
    size = out_S.shape[1]
    for s in range(len(seeds_S)):
        out = out_S[s]
        for block in range(start // 16, (start + size + 15) // 16):
            c0, c1, c2, c3 = _Word(block) + _ONE, _ZERO, _ZERO, _ZERO
            k0, k1 = seeds_S[s], key
            for _ in range(10):
                high0, high1 = _high_half(c0, _M0), _high_half(c2, _M1)
                c0, c1, c2, c3 = high1 ^ c1 ^ k0, c2 * _M1, high0 ^ c3 ^ k1, c0 * _M0
                k0, k1 = k0 + _W0, k1 + _W1
            first = block * 16 - start  # of this block's elements, where they go
            if first >= 0 and first + 16 <= size:
                for lane in range(4):
                    shift = _Word(lane * _LANE_BITS)
                    out[first + lane] = table[c0 >> shift & _LANE]
                    out[first + lane + 4] = table[c1 >> shift & _LANE]
                    out[first + lane + 8] = table[c2 >> shift & _LANE]
                    out[first + lane + 12] = table[c3 >> shift & _LANE]
            else:
                for lane in range(max(0, -first), min(16, size - first)):
                    word = c0 if lane < 4 else c1 if lane < 8 else c2 if lane < 12 else c3
                    out[first + lane] = table[word >> _Word(lane % 4 * _LANE_BITS) & _LANE]


Numbers: TypeAlias = NDArray[np.float32]

_TILE = 4096
"""Elements of a tile at most: 16 KiB, which leaves room for the rows that are added to it."""
_WIDTH = 1024
"""Columns of a tile at most."""


@compiled("void(float32[:,::1], float32[:,:], float32[:,::1])")
def add_outer_products_(weight: Numbers, columns: Numbers, rows: Numbers) -> None:
    """Add columns[n][:, None] * rows[n][None, :] to W, for each n in order, in place.

    Args:
        weight: (rows of W, columns of W).
        columns: (updates, rows of W).
        rows: (updates, columns of W).
    """
    height, width = weight.shape
    fours = len(rows) // 4 * 4
    across = max(1, min(width, _WIDTH))
    down = max(1, _TILE // across)
    for left in range(0, width, across):
        right = min(left + across, width)
        for top in range(0, height, down):
            bottom = min(top + down, height)
            for n in range(0, fours, 4):
                row0, row1 = rows[n, left:right], rows[n + 1, left:right]
                row2, row3 = rows[n + 2, left:right], rows[n + 3, left:right]
                for i in range(top, bottom):
                    w = weight[i, left:right]
                    c0, c1 = columns[n, i], columns[n + 1, i]
                    c2, c3 = columns[n + 2, i], columns[n + 3, i]
                    for j in range(right - left):
                        two = (w[j] + c0 * row0[j]) + c1 * row1[j]
                        w[j] = (two + c2 * row2[j]) + c3 * row3[j]
            for n in range(fours, len(rows)):
                row = rows[n, left:right]
                for i in range(top, bottom):
                    w = weight[i, left:right]
                    for j in range(right - left):
                        w[j] += columns[n, i] * row[j]
