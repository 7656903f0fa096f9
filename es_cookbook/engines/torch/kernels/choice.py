"""Kernels over rows of logits: choice of tokens, and their probabilities.

A row of a large vocabulary is a megabyte, so it is read as it is, in float32 or bfloat16, and what
is made of it (its softmax) is one row that stays in the processor's cache, used again for the next.
"""

import math

import numpy as np
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    LANES,
    ONE,
    ZERO,
    Number,
    Row,
    add,
    exponential,
    fma,
    kernel,
    larger,
    largest_of,
    load,
    multiply,
    read,
    spread,
    store,
    sum_of,
)
from es_cookbook.engines.torch.kernels.rows import of_rows

_CHUNK = 16 * LANES
"""Logits that are compared together: the index is located once the maximum is known."""
_LOWEST = np.float32(-np.inf)


@kernel()
def _first_largest(x: Row, at: int, size: int) -> int:
    """Return the index of a row's largest number, the first of equal ones, or of the first NaN."""
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
    """Write the index of the largest number of each of these rows; NaN counts as the largest.

    Args:
        logits_R_V: rows of logits.
        rows_B: which of them.
        tokens_B: written.
    """
    size, logits = logits_R_V.shape[1], logits_R_V.reshape(-1)
    for b in range(len(rows_B)):
        tokens_B[b] = _first_largest(logits, rows_B[b] * size, size)


_LARGEST = np.float32(3e38)


@kernel()
def _masses(x: Row, at: int, size: int, top: Number, scale: Number, out: Row) -> None:
    """Write exp((x - top) · scale), which is at most 1, for a row of `size` logits."""
    whole = size // LANES * LANES
    # `exponential` is never 0: its value for -inf is subtracted.
    least = multiply(exponential(spread(_LOWEST)), spread(-ONE))
    for i in range(0, whole, LANES):
        power = multiply(add(load(x, at + i), spread(-top)), spread(scale))
        store(out, i, add(exponential(power), least))
    for i in range(whole, size):
        out[i] = math.exp((read(x, at + i) - top) * scale)


@kernel()
def _sums(masses_V: Row, size: int, sums: NDArray[np.float64]) -> float:
    """Write the mass of each chunk, and return that of all of them."""
    total = 0.0
    for chunk in range(len(sums)):
        first, end = chunk * _CHUNK, min((chunk + 1) * _CHUNK, size)
        whole = first + (end - first) // LANES * LANES
        lanes = spread(ZERO)
        for i in range(first, whole, LANES):
            lanes = add(lanes, load(masses_V, i))
        sums[chunk] = sum_of(lanes)
        for i in range(whole, end):
            sums[chunk] += read(masses_V, i)
        total += sums[chunk]
    return total


@kernel(of_rows("void({rows}[:,::1], int64[::1], int64[::1], int64[::1], float32[:,::1])"))
def log_probabilities(
    logits_R_V: Row,
    rows_B: NDArray[np.int64],
    tokens_B: NDArray[np.int64],
    best_B: NDArray[np.int64],
    logprobs_B_2: NDArray[np.float32],
) -> None:
    """Write the log-softmax of one token of each of these rows, and of the most probable one.

    Args:
        logits_R_V: rows of logits.
        rows_B: the rows to read.
        tokens_B: the token of each.
        best_B: written: the most probable token.
        logprobs_B_2: written: of `tokens_B`, and of `best_B`; NaN where a logit is NaN or infinite.
    """
    size, logits = logits_R_V.shape[1], logits_R_V.reshape(-1)
    masses = np.empty(size, np.float32)
    sums = np.empty((size + _CHUNK - 1) // _CHUNK, np.float64)
    for b in range(len(rows_B)):
        at = rows_B[b] * size
        best_B[b] = _first_largest(logits, at, size)
        top = read(logits, at + best_B[b])
        if not math.isfinite(top):
            logprobs_B_2[b, 0] = logprobs_B_2[b, 1] = np.nan
            continue
        _masses(logits, at, size, top, ONE, masses)
        log_total = math.log(_sums(masses, size, sums))
        own = np.float64(read(logits, at + tokens_B[b])) - np.float64(top)
        logprobs_B_2[b, 0], logprobs_B_2[b, 1] = own - log_total, -log_total


_LEVELS = 1 << 12
"""Levels of mass in the search for a nucleus: 128 per power of two, the last for all below."""
_BITS_OF_LEVEL = 16
_BITS_OF_ONE = np.float32(1).view(np.int32)


@kernel()
def _keep_nucleus(masses_V: Row, size: int, most: float) -> None:
    """Set masses outside the nucleus to 0: it has the largest ones, the first of equals first.

    They are those before which less than `most` has been added up. Most are told apart by their
    level, found in the bits of a number; only those of the level where the nucleus ends are sorted.
    """
    bits_V, of_level = masses_V.view(np.int32), np.zeros(_LEVELS, np.float64)
    for i in range(size):
        level = min(_LEVELS - 1, (_BITS_OF_ONE - bits_V[i]) >> _BITS_OF_LEVEL)
        of_level[level] += masses_V[i]
    last, below = 0, 0.0
    while last < _LEVELS - 1 and below + of_level[last] < most:
        below += of_level[last]
        last += 1
    there = np.empty(size, np.int64)
    found = 0
    for i in range(size):
        level = min(_LEVELS - 1, (_BITS_OF_ONE - bits_V[i]) >> _BITS_OF_LEVEL)
        if level > last:
            masses_V[i] = ZERO
        elif level == last:
            there[found] = i
            found += 1
    there = there[:found]
    for i in there[np.argsort(-masses_V[there], kind="mergesort")]:
        mass = masses_V[i]
        if below >= most:
            masses_V[i] = ZERO
        below += mass


@kernel()
def _at_share(masses_V: Row, size: int, sums: NDArray[np.float64], share: float) -> int:
    """Return the first index up to which more than this share of the mass lies; -1 if none."""
    total = _sums(masses_V, size, sums)
    target, below, chunk = share * total, 0.0, 0
    while chunk < len(sums) - 1 and below + sums[chunk] <= target:
        below += sums[chunk]
        chunk += 1
    last = -1
    for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, size)):
        mass = read(masses_V, i)
        below += mass
        if mass > ZERO:
            last = i
            if below > target:
                break
    return last


_DRAW = "void({rows}[:,::1], int64[::1], float64[::1], float64[::1], float64[::1], int64[::1])"


@kernel(of_rows(_DRAW))
def draw(
    logits_R_V: Row,
    rows_B: NDArray[np.int64],
    temperature_B: NDArray[np.float64],
    top_p_B: NDArray[np.float64],
    uniform_B: NDArray[np.float64],
    tokens_B: NDArray[np.int64],
) -> None:
    """Invert the cumulative distribution, in vocabulary order, of softmax(logits / temperature).

    Args:
        logits_R_V: rows of logits.
        rows_B: the rows to sample from.
        temperature_B: temperatures above 0.
        top_p_B: nucleus mass, in (0, 1].
        uniform_B: random numbers in [0, 1).
        tokens_B: tokens of the largest logits, overwritten by those drawn; they stay where the
            largest logit is NaN or infinite.
    """
    size, logits = logits_R_V.shape[1], logits_R_V.reshape(-1)
    masses = np.empty(size, np.float32)
    sums = np.empty((size + _CHUNK - 1) // _CHUNK, np.float64)
    for b in range(len(rows_B)):
        at = rows_B[b] * size
        top = read(logits, at + tokens_B[b])
        if not math.isfinite(top):
            continue
        scale = np.float32(min(1 / temperature_B[b], _LARGEST))
        _masses(logits, at, size, top, scale, masses)
        if top_p_B[b] < 1:
            _keep_nucleus(masses, size, top_p_B[b] * _sums(masses, size, sums))
        drawn = _at_share(masses, size, sums, uniform_B[b])
        if drawn >= 0:
            tokens_B[b] = drawn
