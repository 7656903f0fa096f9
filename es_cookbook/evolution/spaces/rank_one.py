"""Rank-1 updates of a weight, one after the other, in a loop that numba compiles for the CPU.

A step of the centre adds thousands of outer products to every weight, W <- W + column · rowᵀ. An
array library reads and writes W once or twice for each of them. Here all of them are added to one
tile of W while it is in the first cache, four in a pass, so what is left is arithmetic.

The arithmetic is exact: every product and every sum is rounded to float32 by itself, in the order
of the updates (`compiled` says why). LLVM works on several elements at once, which changes no bit.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.compiled import compiled

Numbers: TypeAlias = NDArray[np.float32]

_TILE = 4096
"""Elements of a tile at most: 16 KiB, which leaves room for the rows that are added to it."""
_WIDTH = 1024
"""Columns of a tile at most."""


@compiled("void(float32[:,::1], float32[:,:], float32[:,::1])")
def add_outer_products_(weight: Numbers, columns_N: Numbers, rows_N: Numbers) -> None:
    """W <- W + columns[n][:, None] * rows[n][None, :], for each n in order, in place.

    Args:
        weight: (rows of W, columns of W).
        columns_N: (updates, rows of W).
        rows_N: (updates, columns of W).
    """
    height, width = weight.shape
    num_updates = len(rows_N)
    across = max(1, min(width, _WIDTH))
    down = max(1, _TILE // across)
    for left in range(0, width, across):
        right = min(left + across, width)
        for top in range(0, height, down):
            bottom = min(top + down, height)
            fours = num_updates // 4 * 4
            for n in range(0, fours, 4):
                a, b = rows_N[n, left:right], rows_N[n + 1, left:right]
                c, d = rows_N[n + 2, left:right], rows_N[n + 3, left:right]
                for i in range(top, bottom):
                    w = weight[i, left:right]
                    p, q = columns_N[n, i], columns_N[n + 1, i]
                    r, s = columns_N[n + 2, i], columns_N[n + 3, i]
                    for j in range(right - left):
                        w[j] = (((w[j] + p * a[j]) + q * b[j]) + r * c[j]) + s * d[j]
            for n in range(fours, num_updates):
                a = rows_N[n, left:right]
                for i in range(top, bottom):
                    w = weight[i, left:right]
                    p = columns_N[n, i]
                    for j in range(right - left):
                        w[j] += p * a[j]
