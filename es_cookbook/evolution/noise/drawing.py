"""Gaussian noise in a loop that numba compiles for the CPU: many seeds, or a long range of one.

A population's factors are thousands of tensors of a few hundred numbers, and setting NumPy's
generator to a seed takes ten times as long as drawing them. The words are the same, the published
Philox4x64-10 (Salmon et al. 2011; see `philox`), and index the same table.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from es_cookbook.common.compiled import compiled
from es_cookbook.evolution.noise import gaussian, philox

_Word: TypeAlias = np.uint64


def _high(_: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
    """The upper half of the product of two words: one instruction, which Python has not."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
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
def _draw(
    seeds_S: NDArray[np.uint64],
    key: _Word,
    start: int,
    table: NDArray[np.float32],
    out_S: NDArray[np.float32],
) -> None:
    """Elements `start` ... of every seed's noise: a row of `out_S` each."""
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


def draw_gaussians(
    seeds_S: Sequence[int], name: str, start: int, out_S: NDArray[np.float32]
) -> None:
    """Write elements `start` ... of each seed's noise into `out_S` (seeds, elements), contiguous.

    Seeds are 0 ... 2^63 - 1, and so is `start`.
    """
    words_S = np.array(seeds_S, np.uint64)
    _draw(words_S, _Word(philox.name_key(name)), start, gaussian.table(), out_S)
