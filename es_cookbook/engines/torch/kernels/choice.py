"""Kernels that choose a token for each row of logits, in one pass over a large vocabulary."""

import math

import numpy as np
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    LANES,
    ZERO,
    Row,
    fma,
    kernel,
    larger,
    largest_of,
    load,
    read,
    spread,
    sum_of,
)
from es_cookbook.engines.torch.kernels.rows import of_rows

_CHUNK = 16 * LANES
"""Logits that are looked at together: which of them it is is found out once for all."""
_LOWEST = np.float32(-np.inf)


@kernel()
def _first_largest(x: Row, at: int, size: int) -> int:
    """The index of the first of the largest numbers of a row, or of the first NaN."""
    best, first, whole = _LOWEST, 0, size // _CHUNK * _CHUNK
    nothing = spread(ZERO)
    for begin in range(0, whole, _CHUNK):
        top = spread(_LOWEST)
        for i in range(begin, begin + _CHUNK, LANES):
            lanes = load(x, at + i)
            top = larger(top, lanes)
            nothing = fma(lanes, spread(ZERO), nothing)
        highest = largest_of(top)
        if highest > best:
            best, first = highest, begin
    if sum_of(nothing) != ZERO:  # a NaN, which hides others, or an infinite one
        best, first, whole = _LOWEST, 0, 0
    for i in range(first, whole):
        if read(x, at + i) == best:
            first = i
            break
    for i in range(whole, size):
        number = read(x, at + i)
        if number > best:
            best, first = number, i
        elif not number <= best:
            return i
    return first


@kernel(of_rows("void({rows}[:,::1], int64[::1], int64[::1])"))
def first_largest(logits_R_V: Row, rows_B: NDArray[np.int64], tokens_B: NDArray[np.int64]) -> None:
    """The first of the largest of each of these rows; NaN counts as the largest.

    Args:
        logits_R_V: rows of logits.
        rows_B: which of them.
        tokens_B: written.
    """
    size, logits = logits_R_V.shape[1], logits_R_V.reshape(-1)
    for b in range(len(rows_B)):
        tokens_B[b] = _first_largest(logits, rows_B[b] * size, size)


_DRAW = "void({rows}[:,::1], int64[::1], float64[::1], float64[::1], int64[::1])"


@kernel(of_rows(_DRAW))
def draw(
    logits_R_V: Row,
    rows_B: NDArray[np.int64],
    temperature_B: NDArray[np.float64],
    uniform_B: NDArray[np.float64],
    tokens_B: NDArray[np.int64],
) -> None:
    """Invert the cumulative distribution, in vocabulary order, of softmax(logits / temperature).

    Args:
        logits_R_V: rows of logits.
        rows_B: which of them.
        temperature_B: above 0.
        uniform_B: in [0, 1).
        tokens_B: of the largest logits; what is drawn is written.
    """
    size, logits = logits_R_V.shape[1], logits_R_V.reshape(-1)
    sums = np.empty((size + _CHUNK - 1) // _CHUNK, np.float64)
    for b in range(len(rows_B)):
        at, temperature = rows_B[b] * size, temperature_B[b]
        top, total = np.float64(read(logits, at + tokens_B[b])) / temperature, 0.0
        for chunk in range(len(sums)):
            mass = 0.0
            for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, size)):
                mass += math.exp(np.float64(read(logits, at + i)) / temperature - top)
            sums[chunk] = mass
            total += mass
        target, below, chunk = uniform_B[b] * total, 0.0, 0
        while chunk < len(sums) - 1 and below + sums[chunk] <= target:
            below += sums[chunk]
            chunk += 1
        i, last = chunk * _CHUNK, size - 1
        while i < last:
            below += math.exp(np.float64(read(logits, at + i)) / temperature - top)
            if below > target:
                break
            i += 1
        tokens_B[b] = i
