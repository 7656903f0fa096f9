"""Kernels that attend over a slot cache, one token after the other.

A token's sums are over its own positions alone, each in one order, so its bits depend on nothing
else. `attend_rotated` begins with what a linear layer made of queries, keys and values, side by
side.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    LANES,
    ONE,
    TWO,
    ZERO,
    Lanes,
    Number,
    Row,
    add,
    among,
    divide,
    exponential,
    fma,
    kernel,
    larger,
    largest_of,
    load,
    multiply,
    prefetch,
    read,
    spread,
    store,
    sum_of,
    write,
)
from es_cookbook.engines.torch.kernels.rows import (
    add_ranks,
    norm_row,
    of_rows,
    rank_factors,
    tiles,
    widen_row,
)

STEP = LANES
"""Positions, and columns of values, that attention works on together: a cache has multiples."""
_HIDDEN = np.float32(-1e30)
"""A score that counts for nothing."""

# Arrays have one axis here, and come with where a row of them begins: a view of a row would count
# references, which costs more than many a row's work.


@kernel()
def _capped(x: Lanes, cap: Lanes) -> Lanes:
    """Multiply tanh(x) by the cap."""
    e = exponential(multiply(x, spread(TWO)))
    one = spread(ONE)
    return multiply(cap, divide(add(e, spread(-ONE)), add(e, one)))


@kernel()
def _score(
    q: Row,
    at: int,
    other: int,
    depth: int,
    keys: Row,
    start: int,
    first: int,
    end: int,
    scale: Lanes,
    cap: Number,
    scores: Row,
    length: int,
    ahead: int,
) -> None:
    """Scores of two queries, at `at` and `other`, with positions `first` to `end` of a slot's keys.

    The slot's blocks, (depth, STEP) each, lie in `keys` from `start` on; two are taken together.
    Scores of the second query lie `length` behind those of the first. Keys that lie `ahead` of
    these are fetched on the way: a token's that comes soon, whose slot no processor would guess.
    """
    for position in range(first, end, 2 * STEP):
        two = position + STEP < end
        block = start + position * depth
        next_block = block + STEP * depth if two else block
        a = b = c = e = spread(ZERO)
        for d in range(depth):
            x, y = spread(read(q, at + d)), spread(read(q, other + d))
            k0, k1 = load(keys, block + d * STEP), load(keys, next_block + d * STEP)
            a, b = fma(x, k0, a), fma(x, k1, b)
            c, e = fma(y, k0, c), fma(y, k1, e)
            prefetch(keys, block + d * STEP + ahead)
            prefetch(keys, next_block + d * STEP + ahead)
        a, b = multiply(a, scale), multiply(b, scale)
        c, e = multiply(c, scale), multiply(e, scale)
        if cap > ZERO:
            s = spread(cap)
            a, b, c, e = _capped(a, s), _capped(b, s), _capped(c, s), _capped(e, s)
        store(scores, position, a)
        store(scores, length + position, c)
        if two:
            store(scores, position + STEP, b)
            store(scores, length + position + STEP, e)


@kernel()
def _normalised(scores: Row, at: int, first: int, seen: int, n: int, end: int) -> Number:
    """Make exponentials of scores, of those not seen too small to count; gives 1 / their sum."""
    highest = spread(_HIDDEN)
    for position in range(first, end, LANES):
        score = load(scores, at + position)
        if position < seen or position + LANES > n:
            score = among(score, seen - position, n - position, _HIDDEN)
            store(scores, at + position, score)
        highest = larger(highest, score)
    minus_top, total = spread(-largest_of(highest)), spread(ZERO)
    for position in range(at + first, at + end, LANES):
        e = exponential(add(load(scores, position), minus_top))
        store(scores, position, e)
        total = add(total, e)
    return ONE / sum_of(total)


@kernel()
def _weigh(
    scores: Row,
    length: int,
    seen: int,
    n: int,
    values: Row,
    start: int,
    width: int,
    second: int,
    out: Row,
    ahead: int,
) -> None:
    """Sums of columns of values over positions `seen` to `n`, weighted by two queries' scores.

    A position's columns, `width` apart, lie in `values` from `start` on; the sums are of `STEP` of
    them, and of the `STEP` that are `second` columns behind. Every other position is summed apart.
    The second query's sums lie 2 · STEP behind those of the first in `out`. Values `ahead` of these
    are fetched, as keys are.
    """
    a = b = c = e = spread(ZERO)
    f = g = h = k = spread(ZERO)
    whole = seen + (n - seen) // 2 * 2
    for position in range(seen, whole, 2):
        other = length + position
        x, y = spread(read(scores, position)), spread(read(scores, other))
        z, w = spread(read(scores, position + 1)), spread(read(scores, other + 1))
        at = start + position * width
        v0, v1 = load(values, at), load(values, at + second)
        u0, u1 = load(values, at + width), load(values, at + width + second)
        prefetch(values, at + ahead)
        prefetch(values, at + width + ahead)
        a, b = fma(x, v0, a), fma(x, v1, b)
        c, e = fma(y, v0, c), fma(y, v1, e)
        f, g = fma(z, u0, f), fma(z, u1, g)
        h, k = fma(w, u0, h), fma(w, u1, k)
    if whole < n:
        x, y = spread(read(scores, whole)), spread(read(scores, length + whole))
        at = start + whole * width
        v0, v1 = load(values, at), load(values, at + second)
        a, b = fma(x, v0, a), fma(x, v1, b)
        c, e = fma(y, v0, c), fma(y, v1, e)
    store(out, 0, add(a, f))
    store(out, STEP, add(b, g))
    store(out, 2 * STEP, add(c, h))
    store(out, 3 * STEP, add(e, k))


@kernel()
def _scaled(x: Row, first: int, size: int, factor: Number, out: Row, at: int) -> None:
    """Write so many numbers from `first` on, times a factor, to `out` from `at` on."""
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, at + i, multiply(load(x, first + i), many))
    for i in range(whole, size):
        write(out, at + i, read(x, first + i) * factor)


_Sizes: TypeAlias = tuple[int, int, int, int, int, int]
"""Heads, kv heads, depth of queries and keys, width of values, and of caches length and columns."""
_TOGETHER = 8
"""Tokens whose keys and values are written before the first of them attends.

What was just written in small pieces cannot be read in a large one until it has left for the cache.
While a token attends, what the one so many behind it will read is fetched.
"""


@kernel()
def _keep(
    rows: Row, of_row: int, sizes: _Sizes, keys: Row, values: Row, slot: int, position: int
) -> None:
    """Write a token's keys and values into its slot.

    Its row, from `of_row` on, is its queries, (heads, depth), keys, (kv heads, depth), and values,
    (kv heads, width), one after the other.
    """
    heads, kv_heads, depth, width, length, columns = sizes
    for h in range(kv_heads):
        of_keys = (slot * kv_heads + h) * length * depth
        of_values = (slot * kv_heads + h) * length * columns
        newest = of_keys + position // STEP * STEP * depth + position % STEP
        k = of_row + (heads + h) * depth
        for d in range(depth):
            write(keys, newest + d * STEP, read(rows, k + d))
        v = of_row + (heads + kv_heads) * depth + h * width
        _scaled(rows, v, width, ONE, values, of_values + position * columns)


@kernel()
def _attend_tokens(
    begin: int,
    end: int,
    rows: Row,
    row_size: int,
    sizes: _Sizes,
    keys: Row,
    values: Row,
    slots_T: NDArray[np.int64],
    positions_T: NDArray[np.int64],
    scale: Number,
    softcap: Number,
    window: int,
    scores: Row,
    part: Row,
    out: Row,
) -> None:
    """Attend for tokens `begin` to `end`, whose keys and values are in their slots.

    Of a token's row in `rows` queries are read, (heads, depth). The caches `keys` and `values` have
    `length` positions a slot, as in `attend`. `scores`, 2 · length, and `part`, 4 · STEP, are to
    work in, and `out` is written, (tokens, heads, width).
    """
    heads, kv_heads, depth, width, length, columns = sizes
    repeats = heads // kv_heads
    factor = spread(scale / softcap if softcap > 0 else scale)
    for t in range(begin, end):
        slot, at = slots_T[t], t * heads * width
        if slot < 0:
            for i in range(heads * width):
                write(out, at + i, ZERO)
            continue
        of_row = (t - begin) * row_size
        n = positions_T[t] + 1
        seen = max(0, n - window) if window > 0 else 0
        first, last = seen // STEP * STEP, (n + STEP - 1) // STEP * STEP
        after = slots_T[min(t + _TOGETHER, len(slots_T) - 1)]
        ahead = (after - slot) * kv_heads * length if after >= 0 else 0
        for h in range(kv_heads):
            of_keys = (slot * kv_heads + h) * length * depth
            of_values = (slot * kv_heads + h) * length * columns
            for r in range(0, repeats, 2):
                head = h * repeats + r
                other = min(head + 1, h * repeats + repeats - 1)
                _score(
                    rows,
                    of_row + head * depth,
                    of_row + other * depth,
                    depth,
                    keys,
                    of_keys,
                    first,
                    last,
                    factor,
                    softcap,
                    scores,
                    length,
                    ahead * depth,
                )
                share0 = _normalised(scores, 0, first, seen, n, last)
                share1 = _normalised(scores, length, first, seen, n, last)
                for d in range(0, columns, 2 * STEP):
                    _weigh(
                        scores,
                        length,
                        seen,
                        n,
                        values,
                        of_values + d,
                        columns,
                        STEP if d + STEP < columns else 0,
                        part,
                        ahead * columns,
                    )
                    size = min(2 * STEP, width - d)
                    _scaled(part, 0, size, share0, out, at + head * width + d)
                    _scaled(part, 2 * STEP, size, share1, out, at + other * width + d)


_ATTEND = (
    "void(float32[:,:,:], float32[:,:,:], float32[:,:,:], {cache}[:,:,:,:,::1],"
    "{cache}[:,:,:,:,::1], int64[::1], int64[::1], float32, float32, int64, float32[:,:,::1])"
)


@kernel([_ATTEND.format(cache=cache) for cache in ("float32", "uint16")])
def attend(
    q_T: NDArray[np.float32],
    k_T: NDArray[np.float32],
    v_T: NDArray[np.float32],
    keys: Row,
    values: Row,
    slots_T: NDArray[np.int64],
    positions_T: NDArray[np.int64],
    scale: float,
    softcap: float,
    window: int,
    out_T: NDArray[np.float32],
) -> None:
    """Write tokens' keys and values into their slots, some tokens at a time, and attend.

    A token sees its slot up to itself, and no more than `window` positions if that is not 0. Sums
    are over its own positions alone, each in one order, so its bits depend on nothing else.

    Args:
        q_T: (tokens, heads, d).
        k_T: (tokens, kv heads, d).
        v_T: (tokens, kv heads, width).
        keys: (slots, kv heads, blocks, d, STEP), written.
        values: (slots, kv heads, blocks, STEP, columns), written; columns are `width` rounded up to
            `STEP`.
        slots_T: of each token, negative for one that is nobody's, which gets zeros; tokens of one
            slot come in the order of their positions.
        positions_T: of each token, in its slot.
        scale: factor on scores.
        softcap: scores are squashed to ± this; 0 for not.
        window: most positions seen; 0 for all.
        out_T: (tokens, heads, width), written.
    """
    heads, kv_heads, depth, width = q_T.shape[1], k_T.shape[1], q_T.shape[2], v_T.shape[2]
    length, columns = keys.shape[2] * STEP, values.shape[4]
    sizes = heads, kv_heads, depth, width, length, columns
    flat_keys, flat_values, out = keys.reshape(-1), values.reshape(-1), out_T.reshape(-1)
    scores = np.empty(2 * length, np.float32)
    part = np.empty(4 * STEP, np.float32)
    size = (heads + kv_heads) * depth + kv_heads * width
    rows = np.empty(_TOGETHER * size, np.float32)
    for begin in range(0, len(q_T), _TOGETHER):
        end = min(begin + _TOGETHER, len(q_T))
        for t in range(begin, end):
            if slots_T[t] < 0:
                continue
            at = (t - begin) * size
            for h in range(heads):
                for d in range(depth):
                    rows[at + h * depth + d] = q_T[t, h, d]
            for h in range(kv_heads):
                for d in range(depth):
                    rows[at + (heads + h) * depth + d] = k_T[t, h, d]
                for d in range(width):
                    rows[at + (heads + kv_heads) * depth + h * width + d] = v_T[t, h, d]
            _keep(rows, at, sizes, flat_keys, flat_values, slots_T[t], positions_T[t])
        _attend_tokens(
            begin,
            end,
            rows,
            size,
            sizes,
            flat_keys,
            flat_values,
            slots_T,
            positions_T,
            scale,
            softcap,
            window,
            scores,
            part,
            out,
        )


@kernel()
def _rotate(x: Row, at: int, cos: Row, sin: Row, of_token: int, size: int) -> None:
    """Turn pairs of a row's first `size` numbers, of their halves, by angles from `of_token` on."""
    half = size // 2
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        a, b = load(x, at + i), load(x, at + half + i)
        minus = multiply(b, multiply(load(sin, of_token + i), spread(-ONE)))
        other = multiply(a, load(sin, of_token + half + i))
        store(x, at + i, fma(a, load(cos, of_token + i), minus))
        store(x, at + half + i, fma(b, load(cos, of_token + half + i), other))
    for i in range(whole, half):
        p, q = x[at + i], x[at + half + i]
        x[at + i] = p * cos[of_token + i] - q * sin[of_token + i]
        x[at + half + i] = q * cos[of_token + half + i] + p * sin[of_token + half + i]


@kernel(
    of_rows(
        "void({rows}[:,::1], {rows}[:,::1], {factors}, float32[:,::1], float32[:,::1],"
        "float32[::1], float32[::1], float32, {rows}[:,:,:,:,::1], {rows}[:,:,:,:,::1],"
        "int64[::1], int64[::1], float32, int64, {rows}[:,::1])"
    )
)
def attend_rotated(
    y_T_N: Row,
    x_T_K: Row,
    a_G_R_N: NDArray[np.float32],
    b_G_R_K: NDArray[np.float32],
    columns_R: NDArray[np.int64],
    genome_of_block: NDArray[np.int64],
    height: int,
    cos_T_D: NDArray[np.float32],
    sin_T_D: NDArray[np.float32],
    q_norm_D: Row,
    k_norm_D: Row,
    epsilon: float,
    keys: Row,
    values: Row,
    slots_T: NDArray[np.int64],
    positions_T: NDArray[np.int64],
    scale: float,
    window: int,
    out_T_N: Row,
) -> None:
    """Attend with queries, keys and values as linear layers made them, side by side in `y_T_N`.

    A row at a time, low-rank parts are added (`x_T_K` to `height` as in `add_low_rank`; without
    genomes, `genome_of_block` is empty), each head is normed with the weights `q_norm_D` or
    `k_norm_D` (empty for none), and its first numbers are turned by the token's rotary position,
    `cos_T_D` and `sin_T_D`. The rest, `keys` to `window`, is as in `attend`, but that `out_T_N` is
    (tokens, heads · d).
    """
    kv_heads, depth = keys.shape[1], keys.shape[3]
    heads = out_T_N.shape[1] // depth
    length, columns = keys.shape[2] * STEP, values.shape[4]
    sizes = heads, kv_heads, depth, depth, length, columns
    outputs, rotary = y_T_N.shape[1], cos_T_D.shape[1]
    ranks = len(columns_R) if len(genome_of_block) else 0
    of_genome, stride = a_G_R_N.shape[1] * a_G_R_N.shape[2], a_G_R_N.shape[2]
    factors = rank_factors(x_T_K, b_G_R_K, ranks, genome_of_block, height)
    tiled = tiles(columns_R, outputs)
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    cos, sin = cos_T_D.reshape(-1), sin_T_D.reshape(-1)
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    scores = np.empty(2 * length, np.float32)
    part = np.empty(4 * STEP, np.float32)
    rows = np.empty(_TOGETHER * outputs, np.float32)
    for begin in range(0, len(y_T_N), _TOGETHER):
        end = min(begin + _TOGETHER, len(y_T_N))
        for t in range(begin, end):
            if slots_T[t] < 0:
                continue
            of_y, at = t * outputs, (t - begin) * outputs
            if ranks:
                of_a, of_factors = genome_of_block[t // height] * of_genome, t * ranks
                add_ranks(
                    y,
                    of_y,
                    outputs,
                    factors,
                    of_factors,
                    a,
                    of_a,
                    stride,
                    columns_R,
                    tiled,
                    rows,
                    at,
                )
            else:
                widen_row(y, of_y, outputs, rows, at)
            for head in range(heads + kv_heads):
                of_head = at + head * depth
                if len(q_norm_D):
                    weight = q_norm_D if head < heads else k_norm_D
                    norm_row(rows, of_head, depth, weight, epsilon, rows, of_head)
                _rotate(rows, of_head, cos, sin, t * rotary, rotary)
            _keep(rows, at, sizes, flat_keys, flat_values, slots_T[t], positions_T[t])
        _attend_tokens(
            begin,
            end,
            rows,
            outputs,
            sizes,
            flat_keys,
            flat_values,
            slots_T,
            positions_T,
            scale,
            ZERO,
            window,
            scores,
            part,
            out,
        )
