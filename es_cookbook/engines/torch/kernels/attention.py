"""Kernels that attend over a cache, one token after the other.

Keys and values of a sequence lie in runs of neighbouring places of the cache: one where nothing is
shared, or those of a prefix that others read as well, and its own. A token's sums are over its own
positions alone, each in one order, wherever these lie, so its bits depend on nothing else.
`attend` begins with what linear layers made, queries, keys and values side by side.
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
    read,
    spread,
    store,
    sum_of,
    write,
)
from es_cookbook.engines.torch.kernels.panels import QUERIES, REGISTERS, multiply_rows
from es_cookbook.engines.torch.kernels.rows import (
    FACTORS,
    RankFactors,
    add_ranks,
    norm_row,
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

Data just written in small pieces cannot be read in a large one until it has left for the cache.
While a token attends, the data of the token `_TOGETHER` behind it is prefetched.
"""

# A layer's cache is (blocks, numbers of a block). A block has the keys of `STEP` places, (kv heads,
# d, STEP), and then their values, (kv heads, STEP, columns), where columns are the width of values
# rounded up to `STEP`. Place i is place i % STEP of block i // STEP.
_Indices: TypeAlias = NDArray[np.int64]
Where: TypeAlias = tuple[_Indices, _Indices, _Indices, _Indices]
"""The sequence of each token, negative for one of no request, and its position there; then by
sequence the first position of each of its runs, and how many places these lie after their
positions. A run begins where a block does and may end within one. Runs that a sequence lacks begin
beyond all positions, and lie where its last one does.
"""
AttentionSettings: TypeAlias = tuple[Number, Number, int]
"""Attention settings of a layer: factor on scores; cap that scores are squashed to, 0 for none;
most positions seen, 0 for all."""
Linear: TypeAlias = tuple[Row, Row, RankFactors, tuple[Row, Row], tuple[Row, Row, float]]
"""Outputs of linear layers, side by side, y_T_N; their inputs, x_T_N; the low-rank parts
to add, as in `add_low_rank`; cosines and sines of positions; weights of norms of queries and of
keys, empty for none, and their epsilon."""


class _Sizes(NamedTuple):
    """Sizes of a token's queries (heads, depth), keys (kv heads, depth), values (kv heads, width).

    The cache has `columns` columns per value, and blocks of `block` numbers.
    """

    heads: int
    kv_heads: int
    depth: int
    width: int
    columns: int
    block: int


# Arrays have one axis here, and come with where a row of them begins: a view of a row would count
# references, which costs more than many a row's work.


_multiply_queries = multiply_rows(1, scaled=True)
_multiply_scores = multiply_rows(2, scaled=False)


@kernel(inline=True)
def _score(
    queries: int,
    rows: Row,
    first: int,
    keys: Row,
    place: tuple[int, int, int],
    seen: tuple[int, int],
    sizes: _Sizes,
    scale: Lanes,
    scores: Row,
) -> None:
    """Write scores of queries with a run's keys, at the positions `seen`.

    Args:
        queries: number of queries, at most `QUERIES`.
        rows: queries, side by side.
        first: where the first query begins.
        keys: the cache; two blocks are taken together.
        place: where a head's keys begin in a block, how many places the run lies after its
            positions, and how far ahead keys are fetched.
        seen: first position, and one past the last.
        sizes: sizes of the cache.
        scale: factor on scores.
        scores: written, a third for each query; also the rest of the first block, and up to two
            blocks beyond the last position, which is for the next run to write.
    """
    of_head, shift, ahead = place
    begin = seen[0] - (seen[0] + shift) % STEP
    for position in range(begin, seen[1], 2 * STEP):
        gap = sizes.block if position + STEP < seen[1] else 0
        block = of_head + (position + shift) // STEP * sizes.block
        of_keys = keys, block, STEP, gap, ahead, 0, 0
        sums = scores, position, 0, len(scores) // QUERIES, STEP
        _multiply_queries(queries, (rows, first, sizes.depth), of_keys, sums, sizes.depth, scale)


@kernel()
def _cap(scores: Row, first: int, end: int, cap: Number) -> None:
    """Replace scores x by tanh(x) times the cap."""
    # A pass over all scores: within `_score` it would cost all models without a cap 5 %.
    for position in range(first, end, LANES):
        power = exponential(multiply(load(scores, position), spread(TWO)))
        tanh = divide(add(power, spread(-ONE)), add(power, spread(ONE)))  # (e²ˣ - 1) / (e²ˣ + 1)
        store(scores, position, multiply(spread(cap), tanh))


@kernel(inline=True)
def _normalised(scores: Row, at: int, first: int, seen: int, n: int, end: int) -> Number:
    """Replace scores by exponentials, unseen ones by 0 or nearly 0; return 1 / their sum."""
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


_WEIGHED = QUERIES * REGISTERS * STEP
"""Sums of two registers of columns for each query."""


@kernel()
def _weigh(
    queries: int,
    scores: Row,
    seen: tuple[int, int],
    values: Row,
    place: tuple[int, int, int],
    second: int,
    sizes: _Sizes,
    places: tuple[int, int],
    sums: Row,
) -> None:
    """Add values of a run, weighted by the scores of queries, to sums of columns.

    Args:
        queries: number of queries, at most `QUERIES`.
        scores: as `_score` writes them.
        seen: first position, and one past the last; every other one is added to other sums.
        values: the cache.
        place: where a head's values begin in a block, how many places the run lies after its
            positions, and how far ahead values are fetched.
        second: how far behind the first `STEP` columns the other `STEP` are.
        sizes: sizes of the cache.
        places: where the sums of the first position are, and those of the one after it.
        sums: 2 · STEP columns per query.
    """
    of_head, shift, ahead = place
    first, columns = seen[0] + shift, sizes.columns
    to_next = sizes.block - STEP * columns
    of_values = values, of_head + first * columns, columns, second, ahead, first, to_next
    of_sums = sums, places[0], places[1] - places[0], REGISTERS * STEP, STEP
    of_scores = scores, seen[0], len(scores) // QUERIES
    _multiply_scores(queries, of_scores, of_values, of_sums, seen[1] - seen[0], spread(ONE))


@kernel()
def _scaled(x: Row, first: int, size: int, factor: Number, out: Row, at: int) -> None:
    """Write `size` numbers of x from `first` on, times a factor, to `out` from `at` on."""
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, at + i, multiply(load(x, first + i), many))
    for i in range(whole, size):
        write(out, at + i, read(x, first + i) * factor)


_Flat: TypeAlias = tuple[Row, Row, Row, _Indices]
"""The cache, and to work in, scores of three queries, their sums of columns of values, and runs."""


@kernel()
def _flat(cache: Row, positions_T: _Indices, most: int) -> _Flat:
    # A run's last block may begin at its last position but one.
    scores = np.empty(QUERIES * ((positions_T.max() + 1 + 3 * STEP) // STEP * STEP), np.float32)
    runs = np.empty(_OF_RUN * most, np.int64)
    return cache.reshape(-1), scores, np.empty(2 * _WEIGHED, np.float32), runs


@kernel()
def _keep(rows: Row, of_row: int, sizes: _Sizes, cache: Row, place: int) -> None:
    """Write a token's keys and values into their place.

    Its row, from `of_row` on, is its queries, keys and values, one after the other.
    """
    depth, width, columns = sizes.depth, sizes.width, sizes.columns
    of_keys = place // STEP * sizes.block + place % STEP
    of_values = place // STEP * sizes.block + sizes.kv_heads * depth * STEP + place % STEP * columns
    k = of_row + sizes.heads * depth
    v = k + sizes.kv_heads * depth
    for i in range(sizes.kv_heads * depth):
        write(cache, of_keys + i * STEP, read(rows, k + i))
    for h in range(sizes.kv_heads):
        _scaled(rows, v + h * width, width, ONE, cache, of_values + h * STEP * columns)


@kernel()
def _last_run(begins_S_R: _Indices, sequence: int, position: int) -> int:
    """Return the run of a sequence that a position is in."""
    run = begins_S_R.shape[1] - 1
    while begins_S_R[sequence, run] > position:
        run -= 1
    return run


_OF_RUN = 4


@kernel(inline=True)
def _runs_of(where: Where, t: int, seen: int, block: int, runs: _Indices) -> int:
    """Write the runs in which a token's positions from `seen` on lie. Returns how many there are.

    Of each its first position, one past the last, how many places it lies after its positions, and
    how far ahead in the cache the data of a later token is.
    """
    sequences_T, positions_T, begins_S_R, shifts_S_R = where
    sequence, n, most = sequences_T[t], positions_T[t] + 1, begins_S_R.shape[1]
    later = sequences_T[min(t + _TOGETHER, len(sequences_T) - 1)]
    number = 0
    for run in range(most):
        end = min(n, begins_S_R[sequence, run + 1]) if run + 1 < most else n
        begin, shift = max(seen, begins_S_R[sequence, run]), shifts_S_R[sequence, run]
        if begin < end:
            runs[number], runs[number + 1], runs[number + 2] = begin, end, shift
            places = shifts_S_R[later, run] - shift if later >= 0 else 0
            runs[number + 3] = places // STEP * block
            number += _OF_RUN
    return number


@kernel()
def _attend_tokens(
    tokens: tuple[int, int],
    rows: Row,
    sizes: _Sizes,
    flat: _Flat,
    where: Where,
    settings: AttentionSettings,
    out: Row,
) -> None:
    """Attend for tokens from the first to one before the second, whose keys and values are kept.

    Queries are read from each token's row in `rows`; `out` is written, (all tokens, heads, width).
    """
    heads, kv_heads, depth, width, columns, block = sizes
    cache, scores, sums, runs = flat
    sequences_T, positions_T = where[0], where[1]
    length = len(scores) // QUERIES
    scale, softcap, window = settings
    wholes = np.empty(QUERIES, np.float32)  # 1 / the sum of each query's exponentials
    repeats, row_size = heads // kv_heads, (heads + kv_heads) * depth + kv_heads * width
    scale_of_all = spread(scale / softcap if softcap > 0 else scale)
    for t in range(tokens[0], tokens[1]):
        at = t * heads * width
        if sequences_T[t] < 0:
            for i in range(heads * width):
                write(out, at + i, ZERO)
            continue
        n = positions_T[t] + 1
        seen = max(0, n - window) if window > 0 else 0
        first, last = seen // STEP * STEP, (n + STEP - 1) // STEP * STEP
        num_runs = _runs_of(where, t, seen, block, runs)
        for h in range(kv_heads):
            of_keys, of_values = h * depth * STEP, (kv_heads * depth + h * columns) * STEP
            for r in range(0, repeats, QUERIES):
                taken, head = min(QUERIES, repeats - r), h * repeats + r
                query = (t - tokens[0]) * row_size + head * depth
                for i in range(0, num_runs, _OF_RUN):
                    place, here = (of_keys, runs[i + 2], runs[i + 3]), (runs[i], runs[i + 1])
                    _score(taken, rows, query, cache, place, here, sizes, scale_of_all, scores)
                for q in range(taken):
                    if softcap > ZERO:
                        _cap(scores, q * length + first, q * length + last, softcap)
                    wholes[q] = _normalised(scores, q * length, first, seen, n, last)
                for d in range(0, columns, REGISTERS * STEP):
                    second = STEP if d + STEP < columns else 0
                    used = taken * REGISTERS * STEP
                    for i in range(0, used, STEP):
                        store(sums, i, spread(ZERO))
                        store(sums, _WEIGHED + i, spread(ZERO))
                    for i in range(0, num_runs, _OF_RUN):
                        place = of_values + d, runs[i + 2], runs[i + 3]
                        here = runs[i], runs[i + 1]
                        # Every other position of the token's is summed apart, in any run.
                        odd = (runs[i] - seen) % 2 * _WEIGHED
                        halves = odd, _WEIGHED - odd
                        _weigh(taken, scores, here, cache, place, second, sizes, halves, sums)
                    for i in range(0, used, STEP):
                        store(sums, i, add(load(sums, i), load(sums, _WEIGHED + i)))
                    size, to = min(2 * STEP, width - d), at + head * width + d
                    for q in range(taken):
                        of_query = q * REGISTERS * STEP
                        _scaled(sums, of_query, size, wholes[q], out, to + q * width)


_WHERE = "Tuple((int64[::1], int64[::1], int64[:,::1], int64[:,::1]))"
_SETTINGS = "Tuple((float32, float32, int64))"


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
    [
        f"void({_LINEAR.format(rows=rows)}, {cache}[:,::1], "
        f"{_WHERE}, {_SETTINGS}, UniTuple(int64, 3), {rows}[:,::1])"
        for rows, cache in (("float32", "float32"), ("float32", "uint16"), ("uint16", "uint16"))
    ]
)
def attend(
    linear: Linear,
    cache: Row,
    where: Where,
    settings: AttentionSettings,
    heads: tuple[int, int, int],
    out_T_N: Row,
) -> None:
    """Write tokens' keys and values into their places, some tokens at a time, and attend.

    A row at a time, low-rank parts are added to queries, keys and values, each head is normed, and
    its first numbers are turned by the token's rotary position. A token sees its sequence up to
    itself. Sums are over its own positions alone, each in one order, so its bits depend on nothing
    else.

    Args:
        linear: queries, keys and values side by side, and operations on them first.
        cache: (blocks, numbers of a block), written.
        where: what a token sees is there, or of a token before it; tokens of no request get zeros.
        settings: attention settings.
        heads: number of query heads, number of kv heads, and width of values.
        out_T_N: (tokens, query heads · width), written.
    """
    y_T_N, x_T_N, (a_G_R_N, b_G_R_N, columns_R, genome_of_block, height), rotary, norms = linear
    (cos_T_N, sin_T_N), (q_norm, k_norm, epsilon) = rotary, norms
    sequences_T, positions_T, begins_S_R, shifts_S_R = where
    (num_heads, kv_heads, width), block = heads, cache.shape[1]
    outputs, turned = y_T_N.shape[1], cos_T_N.shape[1]
    depth = (outputs - kv_heads * width) // (num_heads + kv_heads)
    columns = (width + STEP - 1) // STEP * STEP
    sizes = _Sizes(num_heads, kv_heads, depth, width, columns, block)
    ranks = len(columns_R) if len(genome_of_block) else 0
    stride = a_G_R_N.shape[2]
    of_genome, tiled = a_G_R_N.shape[1] * stride, tiles(columns_R, outputs)
    factors = rank_factors(x_T_N, b_G_R_N, ranks, genome_of_block, height)
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    cos, sin = cos_T_N.reshape(-1), sin_T_N.reshape(-1)
    flat = _flat(cache, positions_T, begins_S_R.shape[1])
    rows = np.empty(_TOGETHER * outputs, np.float32)
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
            for head in range(num_heads + kv_heads):
                of_head = at + head * depth
                if len(q_norm):
                    weight = q_norm if head < num_heads else k_norm
                    norm_row(rows, of_head, depth, weight, epsilon, rows, of_head)
                _rotate(rows, of_head, cos, sin, t * turned, turned)
            run = _last_run(begins_S_R, sequence, position)
            _keep(rows, at, sizes, flat[0], position + shifts_S_R[sequence, run])
        _attend_tokens((begin, end), rows, sizes, flat, where, settings, out)
