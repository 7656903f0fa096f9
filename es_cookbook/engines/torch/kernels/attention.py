"""Kernels that attend over a cache, one token after the other.

Keys and values of a sequence lie in runs of neighbouring places of the cache: one where nothing is
shared, or those of a prefix that others read as well, and its own. A token's sums are over its own
positions alone, each in one order, wherever these lie, so its bits depend on nothing else.
`attend_rotated` begins with what a linear layer made of queries, keys and values, side by side.
"""

from typing import NamedTuple, TypeAlias

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
    FACTORS,
    RankFactors,
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
_TOGETHER = 8
"""Tokens whose keys and values are written before the first of them attends.

What was just written in small pieces cannot be read in a large one until it has left for the cache.
While a token attends, what the one so many behind it will read is fetched.
"""

Cache: TypeAlias = tuple[Row, Row]
"""Keys (kv heads, blocks, d, STEP) and values (kv heads, blocks, STEP, columns).

Columns are the width of values rounded up to `STEP`. Place i is place i % STEP of block i // STEP.
"""
_Indices: TypeAlias = NDArray[np.int64]
Where: TypeAlias = tuple[_Indices, _Indices, _Indices, _Indices]
"""The sequence of each token, negative for one that is nobody's, and its position there; then by
sequence the first position of each of its runs, and how many places these lie after their
positions. A run begins where a block does and may end within one. Runs that a sequence lacks begin
beyond all positions, and lie where its last one does.
"""
Looks: TypeAlias = tuple[Number, Number, int]
"""How a layer looks: factor on scores; the cap that they are squashed to, 0 for none; most
positions seen, 0 for all."""
Linear: TypeAlias = tuple[Row, Row, RankFactors, tuple[Row, Row], tuple[Row, Row, float]]
"""What linear layers made of tokens, side by side, y_T_N; what they read, x_T_N; the low-rank parts
to add, as in `add_low_rank`; cosines and sines of positions; weights of norms of queries and of
keys, empty for none, and their epsilon."""


class _Sizes(NamedTuple):
    """Of queries (heads, depth), keys (kv heads, depth) and values (kv heads, width) of a token.

    The cache has `length` places, and of a value `columns`.
    """

    heads: int
    kv_heads: int
    depth: int
    width: int
    length: int
    columns: int


# Arrays have one axis here, and come with where a row of them begins: a view of a row would count
# references, which costs more than many a row's work.


@kernel()
def _capped(x: Lanes, cap: Lanes) -> Lanes:
    """Multiply tanh(x) by the cap."""
    power = exponential(multiply(x, spread(TWO)))  # tanh x = (e²ˣ - 1) / (e²ˣ + 1)
    return multiply(cap, divide(add(power, spread(-ONE)), add(power, spread(ONE))))


@kernel()
def _score(
    rows: Row,
    heads: tuple[int, int],
    keys: Row,
    block: tuple[int, int, int],
    seen: tuple[int, int],
    scaling: tuple[Lanes, Number],
    scores: Row,
) -> None:
    """Scores of two queries, at `heads` of `rows`, with a run's keys at the positions `seen`.

    Args:
        rows: of which queries are read.
        heads: where the two begin.
        keys: of a run: blocks, (depth, STEP) each; two of them are taken together.
        block: where position 0 would be, their depth, and how far ahead keys are fetched on the
            way: those of a token that comes soon, whose place no processor would guess.
        seen: first position, where a block begins, and one past the last.
        scaling: factor on scores, and their cap.
        scores: written, those of the second query in its second half; also up to the end of the
            last block, which is for the next run to write.
    """
    first, second = heads
    start, depth, ahead = block
    scale, cap = scaling
    length = len(scores) // 2
    for position in range(seen[0], seen[1], 2 * STEP):
        two = position + STEP < seen[1]
        here = start + position * depth
        there = here + STEP * depth if two else here
        # sum_qb: of query q with the keys of block b.
        sum_00 = sum_01 = sum_10 = sum_11 = spread(ZERO)
        for d in range(depth):
            q_0, q_1 = spread(read(rows, first + d)), spread(read(rows, second + d))
            k_0, k_1 = load(keys, here + d * STEP), load(keys, there + d * STEP)
            sum_00, sum_01 = fma(q_0, k_0, sum_00), fma(q_0, k_1, sum_01)
            sum_10, sum_11 = fma(q_1, k_0, sum_10), fma(q_1, k_1, sum_11)
            prefetch(keys, here + d * STEP + ahead)
            prefetch(keys, there + d * STEP + ahead)
        sum_00, sum_01 = multiply(sum_00, scale), multiply(sum_01, scale)
        sum_10, sum_11 = multiply(sum_10, scale), multiply(sum_11, scale)
        if cap > ZERO:
            caps = spread(cap)
            sum_00, sum_01 = _capped(sum_00, caps), _capped(sum_01, caps)
            sum_10, sum_11 = _capped(sum_10, caps), _capped(sum_11, caps)
        store(scores, position, sum_00)
        store(scores, length + position, sum_10)
        if two:
            store(scores, position + STEP, sum_01)
            store(scores, length + position + STEP, sum_11)


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
        weight = exponential(add(load(scores, position), minus_top))
        store(scores, position, weight)
        total = add(total, weight)
    return ONE / sum_of(total)


@kernel()
def _weigh(
    scores: Row,
    seen: tuple[int, int],
    values: Row,
    block: tuple[int, int, int],
    runs: tuple[_Indices, _Indices, int, int, int],
    out: Row,
) -> None:
    """Sums of columns of values over the positions `seen`, weighted by two queries' scores.

    Args:
        scores: as `_score` writes them.
        seen: first position, and one past the last; every other one is summed apart.
        values: a position's columns lie side by side.
        block: where place 0 is; columns of a place; how far behind the first `STEP` columns the
            other `STEP` are.
        runs: as in `Where`, by run; the first run of the token, of another whose values are fetched
            on the way, and one past the token's last.
        out: written: the first query's 2 · STEP sums, then the second's.
    """
    of_head, columns, second = block
    begins, shifts, run, ahead, last = runs
    length = len(scores) // 2
    # even_qc, odd_qc: of query q and its columns c.
    even_00 = even_01 = even_10 = even_11 = spread(ZERO)
    odd_00 = odd_01 = odd_10 = odd_11 = spread(ZERO)
    while run < last:
        position, end = max(begins[run], seen[0]), seen[1]
        if run + 1 < last:
            end = min(end, begins[run + 1])
        start = of_head + shifts[run] * columns
        fetched = (shifts[ahead] - shifts[run]) * columns if ahead >= 0 else 0
        if (
            position < end and (position - seen[0]) % 2 == 1
        ):  # the run before ended with an even one
            other = length + position
            share_0, share_1 = spread(read(scores, position)), spread(read(scores, other))
            at = start + position * columns
            v_0, v_1 = load(values, at), load(values, at + second)
            odd_00, odd_01 = fma(share_0, v_0, odd_00), fma(share_0, v_1, odd_01)
            odd_10, odd_11 = fma(share_1, v_0, odd_10), fma(share_1, v_1, odd_11)
            position += 1
        whole = position + max(0, end - position) // 2 * 2
        for even in range(position, whole, 2):
            other = length + even
            # The shares of two queries in a position, and in the one after it; their columns.
            share_0, share_1 = spread(read(scores, even)), spread(read(scores, other))
            next_0, next_1 = spread(read(scores, even + 1)), spread(read(scores, other + 1))
            at = start + even * columns
            after = at + columns
            v_0, v_1 = load(values, at), load(values, at + second)
            after_0, after_1 = load(values, after), load(values, after + second)
            prefetch(values, at + fetched)
            prefetch(values, after + fetched)
            even_00, even_01 = fma(share_0, v_0, even_00), fma(share_0, v_1, even_01)
            even_10, even_11 = fma(share_1, v_0, even_10), fma(share_1, v_1, even_11)
            odd_00, odd_01 = fma(next_0, after_0, odd_00), fma(next_0, after_1, odd_01)
            odd_10, odd_11 = fma(next_1, after_0, odd_10), fma(next_1, after_1, odd_11)
        if whole < end:
            share_0, share_1 = spread(read(scores, whole)), spread(read(scores, length + whole))
            at = start + whole * columns
            v_0, v_1 = load(values, at), load(values, at + second)
            even_00, even_01 = fma(share_0, v_0, even_00), fma(share_0, v_1, even_01)
            even_10, even_11 = fma(share_1, v_0, even_10), fma(share_1, v_1, even_11)
        run += 1
        ahead += 1 if ahead >= 0 else 0
    store(out, 0, add(even_00, odd_00))
    store(out, STEP, add(even_01, odd_01))
    store(out, 2 * STEP, add(even_10, odd_10))
    store(out, 3 * STEP, add(even_11, odd_11))


@kernel()
def _scaled(x: Row, first: int, size: int, factor: Number, out: Row, at: int) -> None:
    """Write so many numbers from `first` on, times a factor, to `out` from `at` on."""
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, at + i, multiply(load(x, first + i), many))
    for i in range(whole, size):
        write(out, at + i, read(x, first + i) * factor)


_Flat: TypeAlias = tuple[Row, Row, Row, Row]
"""Keys and values, and to work in, scores of two queries and their sums of columns of values."""


@kernel()
def _flat(cache: Cache, positions_T: _Indices) -> _Flat:
    keys, values = cache
    # A run's last block may begin at its last position but one.
    scores = np.empty(2 * ((positions_T.max() + 1 + 3 * STEP) // STEP * STEP), np.float32)
    return keys.reshape(-1), values.reshape(-1), scores, np.empty(4 * STEP, np.float32)


@kernel()
def _keep(rows: Row, of_row: int, sizes: _Sizes, flat: _Flat, place: int) -> None:
    """Write a token's keys and values into their place.

    Its row, from `of_row` on, is its queries, keys and values, one after the other.
    """
    keys, values, _, _ = flat
    depth, width = sizes.depth, sizes.width
    for h in range(sizes.kv_heads):
        of_head = h * sizes.length
        newest = (of_head + place // STEP * STEP) * depth + place % STEP
        k = of_row + (sizes.heads + h) * depth
        for d in range(depth):
            write(keys, newest + d * STEP, read(rows, k + d))
        v = of_row + (sizes.heads + sizes.kv_heads) * depth + h * width
        _scaled(rows, v, width, ONE, values, (of_head + place) * sizes.columns)


@kernel()
def _last_run(begins_S_R: _Indices, sequence: int, position: int) -> int:
    """The run of a sequence that a position is in."""
    run = begins_S_R.shape[1] - 1
    while begins_S_R[sequence, run] > position:
        run -= 1
    return run


@kernel()
def _attend_tokens(
    tokens: tuple[int, int],
    rows: Row,
    sizes: _Sizes,
    flat: _Flat,
    where: Where,
    looks: Looks,
    out: Row,
) -> None:
    """Attend for tokens from the first to one before the second, whose keys and values are kept.

    Of each token's row in `rows` queries are read; `out` is written, (all tokens, heads, width).
    """
    heads, kv_heads, depth, width, places, columns = sizes
    keys, values, scores, part = flat
    sequences_T, positions_T, begins_S_R, shifts_S_R = where
    most, length = begins_S_R.shape[1], len(scores) // 2
    begins, shifts = begins_S_R.reshape(-1), shifts_S_R.reshape(-1)
    scale, softcap, window = looks
    repeats, row_size = heads // kv_heads, (heads + kv_heads) * depth + kv_heads * width
    scaling = spread(scale / softcap if softcap > 0 else scale), softcap
    for t in range(tokens[0], tokens[1]):
        sequence, at = sequences_T[t], t * heads * width
        if sequence < 0:
            for i in range(heads * width):
                write(out, at + i, ZERO)
            continue
        of_row = (t - tokens[0]) * row_size
        n = positions_T[t] + 1
        seen = max(0, n - window) if window > 0 else 0
        first, last = seen // STEP * STEP, (n + STEP - 1) // STEP * STEP
        run = sequence * most
        end_run = run + _last_run(begins_S_R, sequence, n - 1) + 1
        while run + 1 < end_run and begins[run + 1] <= first:
            run += 1
        after = sequences_T[min(t + _TOGETHER, len(sequences_T) - 1)]
        fetched = after * most + run - sequence * most if after >= 0 else -1
        for h in range(kv_heads):
            of_head = h * places
            for r in range(0, repeats, 2):
                head = h * repeats + r
                other = min(head + 1, h * repeats + repeats - 1)
                queries = of_row + head * depth, of_row + other * depth
                for each in range(run, end_run):
                    shift, begin = shifts[each], max(begins[each], first)
                    end = min(n, begins[each + 1]) if each + 1 < end_run else n
                    ahead = shifts[fetched + each - run] - shift if fetched >= 0 else 0
                    block = (of_head + shift) * depth, depth, ahead * depth
                    begin -= (begin + shift) % STEP
                    _score(rows, queries, keys, block, (begin, end), scaling, scores)
                share_0 = _normalised(scores, 0, first, seen, n, last)
                share_1 = _normalised(scores, length, first, seen, n, last)
                for d in range(0, columns, 2 * STEP):
                    second = STEP if d + STEP < columns else 0
                    of_values = of_head * columns + d, columns, second
                    of_runs = begins, shifts, run, fetched, end_run
                    _weigh(scores, (seen, n), values, of_values, of_runs, part)
                    size = min(2 * STEP, width - d)
                    _scaled(part, 0, size, share_0, out, at + head * width + d)
                    _scaled(part, 2 * STEP, size, share_1, out, at + other * width + d)


_CACHE = "Tuple(({cache}[:,:,:,::1], {cache}[:,:,:,::1]))"
_WHERE = "Tuple((int64[::1], int64[::1], int64[:,::1], int64[:,::1]))"
_LOOKS = "Tuple((float32, float32, int64))"
_STATES = "float32[:,:,:]"


@kernel(
    [
        f"void(Tuple(({_STATES}, {_STATES}, {_STATES})), {_CACHE.format(cache=cache)}, {_WHERE},"
        f"{_LOOKS}, float32[:,:,::1])"
        for cache in ("float32", "uint16")
    ]
)
def attend(
    states: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    cache: Cache,
    where: Where,
    looks: Looks,
    out_T: NDArray[np.float32],
) -> None:
    """Write tokens' keys and values into their places, some tokens at a time, and attend.

    A token sees its sequence up to itself. Sums are over its own positions alone, each in one
    order, so its bits depend on nothing else.

    Args:
        states: queries (tokens, heads, d), keys (tokens, kv heads, d), values (tokens, kv heads,
            width).
        cache: written.
        where: what a token sees is there, or of a token before it; nobody's get zeros.
        looks: how.
        out_T: (tokens, heads, width), written.
    """
    q_T, k_T, v_T = states
    sequences_T, positions_T, begins_S_R, shifts_S_R = where
    heads, kv_heads, depth, width = q_T.shape[1], k_T.shape[1], q_T.shape[2], v_T.shape[2]
    length, columns = cache[0].shape[1] * STEP, cache[1].shape[3]
    sizes = _Sizes(heads, kv_heads, depth, width, length, columns)
    flat, out = _flat(cache, positions_T), out_T.reshape(-1)
    of_keys, of_values = heads * depth, (heads + kv_heads) * depth
    size = of_values + kv_heads * width
    rows = np.empty(_TOGETHER * size, np.float32)
    for begin in range(0, len(q_T), _TOGETHER):
        end = min(begin + _TOGETHER, len(q_T))
        for t in range(begin, end):
            sequence, position = sequences_T[t], positions_T[t]
            if sequence < 0:
                continue
            at = (t - begin) * size
            for h in range(heads):
                for d in range(depth):
                    rows[at + h * depth + d] = q_T[t, h, d]
            for h in range(kv_heads):
                for d in range(depth):
                    rows[at + of_keys + h * depth + d] = k_T[t, h, d]
                for d in range(width):
                    rows[at + of_values + h * width + d] = v_T[t, h, d]
            run = _last_run(begins_S_R, sequence, position)
            _keep(rows, at, sizes, flat, position + shifts_S_R[sequence, run])
        _attend_tokens((begin, end), rows, sizes, flat, where, looks, out)


@kernel()
def _rotate(x: Row, at: int, cos: Row, sin: Row, of_token: int, size: int) -> None:
    """Turn pairs of a row's first `size` numbers, of their halves, by angles from `of_token` on."""
    half = size // 2
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        left, right = load(x, at + i), load(x, at + half + i)
        minus = multiply(right, multiply(load(sin, of_token + i), spread(-ONE)))
        plus = multiply(left, load(sin, of_token + half + i))
        # left cos - right sin, and right cos + left sin
        store(x, at + i, fma(left, load(cos, of_token + i), minus))
        store(x, at + half + i, fma(right, load(cos, of_token + half + i), plus))
    for i in range(whole, half):
        x_left, x_right = x[at + i], x[at + half + i]
        x[at + i] = x_left * cos[of_token + i] - x_right * sin[of_token + i]
        x[at + half + i] = x_right * cos[of_token + half + i] + x_left * sin[of_token + half + i]


_ROTARY = "Tuple((float32[:,::1], float32[:,::1]))"
_NORMS = "Tuple((float32[::1], float32[::1], float32))"
_LINEAR = f"Tuple(({{rows}}[:,::1], {{rows}}[:,::1], {FACTORS}, {_ROTARY}, {_NORMS}))"


@kernel(
    of_rows(
        f"void({_LINEAR}, {_CACHE.format(cache='{rows}')}, {_WHERE}, {_LOOKS}, {{rows}}[:,::1])"
    )
)
def attend_rotated(linear: Linear, cache: Cache, where: Where, looks: Looks, out_T_N: Row) -> None:
    """Attend with queries, keys and values as linear layers made them, side by side.

    A row at a time, low-rank parts are added, each head is normed, and its first numbers are turned
    by the token's rotary position. The rest is as in `attend`, but that `out_T_N` is (tokens, heads
    · d) and no scores are capped.
    """
    y_T_N, x_T_N, (a_G_R_N, b_G_R_N, columns_R, genome_of_block, height), rotary, norms = linear
    (cos_T_N, sin_T_N), (q_norm, k_norm, epsilon) = rotary, norms
    sequences_T, positions_T, begins_S_R, shifts_S_R = where
    kv_heads, depth = cache[0].shape[0], cache[0].shape[2]
    heads, outputs, turned = out_T_N.shape[1] // depth, y_T_N.shape[1], cos_T_N.shape[1]
    length, columns = cache[0].shape[1] * STEP, cache[1].shape[3]
    sizes = _Sizes(heads, kv_heads, depth, depth, length, columns)
    ranks = len(columns_R) if len(genome_of_block) else 0
    stride = a_G_R_N.shape[2]
    of_genome, tiled = a_G_R_N.shape[1] * stride, tiles(columns_R, outputs)
    factors = rank_factors(x_T_N, b_G_R_N, ranks, genome_of_block, height)
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    cos, sin = cos_T_N.reshape(-1), sin_T_N.reshape(-1)
    flat = _flat(cache, positions_T)
    rows, uncapped = np.empty(_TOGETHER * outputs, np.float32), (looks[0], ZERO, looks[2])
    for begin in range(0, len(y_T_N), _TOGETHER):
        end = min(begin + _TOGETHER, len(y_T_N))
        for t in range(begin, end):
            sequence, position = sequences_T[t], positions_T[t]
            if sequence < 0:
                continue
            of_y, at = t * outputs, (t - begin) * outputs
            if ranks:
                of_a = genome_of_block[t // height] * of_genome
                places = of_y, t * ranks, of_a, at
                add_ranks(y, factors, a, columns_R, rows, places, (outputs, stride, tiled))
            else:
                widen_row(y, of_y, outputs, rows, at)
            for head in range(heads + kv_heads):
                of_head = at + head * depth
                if len(q_norm):
                    weight = q_norm if head < heads else k_norm
                    norm_row(rows, of_head, depth, weight, epsilon, rows, of_head)
                _rotate(rows, of_head, cos, sin, t * turned, turned)
            run = _last_run(begins_S_R, sequence, position)
            _keep(rows, at, sizes, flat, position + shifts_S_R[sequence, run])
        _attend_tokens((begin, end), rows, sizes, flat, where, uncapped, out)
