"""Loops that numba compiles for the CPU: attention over a slot cache, and work on rows.

They compute in float32, and read and write rows of float32 or of bfloat16, which NumPy knows as
`uint16`. They are written with operations on sixteen numbers side by side. LLVM's vectoriser may
add in another order wherever it likes, and leaves loops of a few dozen numbers scalar; here a
kernel says itself which numbers are added in which order, so a row's bits are the same on every
processor and in every batch. The operations, `load(row, i)` or `fma(a, b, c)`, are a kernel's own:
nobody else calls them.

All of it is one module because numba keeps compiled kernels on the disk, and compiles them again
when their own module has changed, whatever other modules they are made of.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic
from numpy.typing import NDArray

LANES = 16
"""Numbers that an operation works on: a register of AVX-512, two of AVX, four of NEON."""
STEP = LANES
"""Positions, and columns of values, that attention works on together: a cache has multiples."""
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_HALF_BITS = 16
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def compiled(signature: str | list[str] | None = None) -> Callable[[_Kernel], _Kernel]:
    """A kernel: machine code without the interpreter's lock, kept on disk for the next process.

    Args:
        signature: of a kernel's arguments in numba's words, or several, compiled when this module
            is imported; None for what kernels call.
    """
    if signature is None:
        return cast("Callable[[_Kernel], _Kernel]", numba.njit(error_model="numpy"))
    how = {"nogil": True, "error_model": "numpy"}

    def made(kernel: _Kernel) -> _Kernel:
        try:
            return cast("_Kernel", numba.njit(signature, cache=True, **how)(kernel))
        except RuntimeError:  # neither this package's folder nor the user's can be written
            return cast("_Kernel", numba.njit(signature, **how)(kernel))

    return made


class Lanes:
    """Sixteen numbers, for type checkers: a kernel's variable, never an object."""


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _LanesType()


class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


register_default(_LanesType)(_LanesModel)


_Emit = Callable[[Any, Any, Any, Sequence[Any]], Any]
"""Adds an operation's code: (context, builder, signature, arguments) -> its value."""


def _operation(arguments: int, emit: _Emit) -> Any:
    """An operation on lanes alone."""

    def of_three(_: Any, a: Any, b: Any, c: Any) -> tuple[Any, _Emit]:
        return _lanes(a, b, c), emit

    def of_two(_: Any, a: Any, b: Any) -> tuple[Any, _Emit]:
        return _lanes(a, b), emit

    def of_one(_: Any, a: Any) -> tuple[Any, _Emit]:
        return _lanes(a), emit

    return intrinsic([of_one, of_two, of_three][arguments - 1])


def _llvm(name: str, arguments: int) -> Any:
    """One of LLVM's own operations on vectors."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * arguments)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    return _operation(arguments, emit)


def _is_narrow(array: Any) -> bool:
    return array.dtype == types.uint16


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, what: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), what.as_pointer())


def _constant(kind: Any, number: int) -> Any:
    """Of a kind of integers, or of vectors of them."""
    return ir.Constant(kind, [number] * LANES if isinstance(kind, ir.VectorType) else number)


def _widened(builder: Any, shorts: Any, ints: Any, floats: Any) -> Any:
    """Float32 from bfloat16."""
    shifted = builder.shl(builder.zext(shorts, ints), _constant(ints, _HALF_BITS))
    return builder.bitcast(shifted, floats)


def _rounded(builder: Any, floats: Any, ints: Any, shorts: Any) -> Any:
    """The nearest bfloat16, ties to even."""
    bits = builder.bitcast(floats, ints)
    odd = builder.and_(builder.lshr(bits, _constant(ints, _HALF_BITS)), _constant(ints, 1))
    up = builder.add(builder.add(bits, _constant(ints, (1 << (_HALF_BITS - 1)) - 1)), odd)
    return builder.trunc(builder.lshr(up, _constant(ints, _HALF_BITS)), shorts)


def _reader(result: Any, kinds: tuple[Any, Any, Any]) -> Any:
    """An operation that reads an array of one axis from an index on; rows may begin anywhere."""
    floats, ints, shorts = kinds

    def read(_: Any, array: Any, index: Any) -> tuple[Any, _Emit]:
        narrow = _is_narrow(array)

        def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            what = shorts if narrow else floats
            array, index = values
            pointer = _pointer(context, builder, signature.args[0], array, index, what)
            found = builder.load(pointer, align=2 if narrow else 4)
            return _widened(builder, found, ints, floats) if narrow else found

        return result(array, types.intp), emit

    return intrinsic(read)


def _writer(kinds: tuple[Any, Any, Any]) -> Any:
    """An operation that writes to an array of one axis from an index on."""
    floats, ints, shorts = kinds

    def write(_: Any, array: Any, index: Any, value: Any) -> tuple[Any, _Emit]:
        narrow = _is_narrow(array)

        def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            what = shorts if narrow else floats
            array, index, value = values
            pointer = _pointer(context, builder, signature.args[0], array, index, what)
            written = _rounded(builder, value, ints, shorts) if narrow else value
            builder.store(written, pointer, align=2 if narrow else 4)
            return context.get_dummy_value()

        return types.void(array, types.intp, value), emit

    return intrinsic(write)


def _spread(_: Any, number: Any) -> tuple[Any, _Emit]:
    """One number in all lanes."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
        nothing, index = ir.Constant(_FLOATS, ir.Undefined), ir.IntType(32)
        first = builder.insert_element(nothing, values[0], ir.Constant(index, 0))
        zeros = ir.Constant(ir.VectorType(index, LANES), [0] * LANES)
        return builder.shuffle_vector(first, nothing, zeros)

    return _lanes(types.float32), emit


def _halved(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """An operation that makes one number of all lanes: of halves, of halves of these, and so on."""

    def reduce(_: Any, lanes: Any) -> tuple[Any, _Emit]:
        def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            del context, signature
            index, left, width = ir.IntType(32), values[0], LANES
            while width > 1:
                width //= 2
                nothing, kind = ir.Constant(left.type, ir.Undefined), ir.VectorType(index, width)
                halves = [
                    builder.shuffle_vector(
                        left, nothing, ir.Constant(kind, list(range(first, first + width)))
                    )
                    for first in (0, width)
                ]
                left = combine(builder, *halves)
            return builder.extract_element(left, ir.Constant(index, 0))

        return types.float32(lanes), emit

    return intrinsic(reduce)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _power_of_two(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
    """2 to whole numbers from -126 to 127."""
    del context, signature
    whole = builder.fptosi(values[0], _INTS)
    biased = builder.add(whole, ir.Constant(_INTS, [_EXPONENT_BIAS] * LANES))
    shifted = builder.shl(biased, ir.Constant(_INTS, [_MANTISSA_BITS] * LANES))
    return builder.bitcast(shifted, _FLOATS)


def _choose(relation: str) -> _Emit:
    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
        return builder.select(builder.fcmp_ordered(relation, *values), *values)

    return emit


Row: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
_Number: TypeAlias = float | np.floating[Any]
_OfOne: TypeAlias = Callable[[Lanes], Lanes]
_OfTwo: TypeAlias = Callable[[Lanes, Lanes], Lanes]

_VECTORS = _FLOATS, _INTS, _SHORTS
_SCALARS = ir.FloatType(), ir.IntType(32), ir.IntType(16)
load = cast("Callable[[Row, int], Lanes]", _reader(_lanes, _VECTORS))
"""Neighbours of a contiguous array of one axis, from an index on."""
store = cast("Callable[[Row, int, Lanes], None]", _writer(_VECTORS))
read = cast("Callable[[Row, int], _Number]", _reader(types.float32, _SCALARS))
"""One number of it."""
write = cast("Callable[[Row, int, _Number], None]", _writer(_SCALARS))
spread = cast("Callable[[_Number], Lanes]", intrinsic(_spread))
sum_of = cast("Callable[[Lanes], _Number]", _halved(lambda builder, a, b: builder.fadd(a, b)))
largest_of = cast("Callable[[Lanes], _Number]", _halved(_larger))
add: _OfTwo = _operation(2, lambda _context, builder, _signature, both: builder.fadd(*both))
multiply: _OfTwo = _operation(2, lambda _context, builder, _signature, both: builder.fmul(*both))
divide: _OfTwo = _operation(2, lambda _context, builder, _signature, both: builder.fdiv(*both))
larger: _OfTwo = _operation(2, _choose(">"))
smaller: _OfTwo = _operation(2, _choose("<"))
floor: _OfOne = _llvm(f"llvm.floor.v{LANES}f32", 1)
fma: Callable[[Lanes, Lanes, Lanes], Lanes] = _llvm(f"llvm.fma.v{LANES}f32", 3)
"""a · b + c, rounded once."""
_two_to: _OfOne = _operation(1, _power_of_two)

_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_HIDDEN = np.float32(-1e30)
"""A score that counts for nothing."""
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(0.50000001201)


@compiled()
def exponential(x: Lanes) -> Lanes:
    """The natural exponential of each lane, to about one unit in the last place.

    Below -87 it is that of -87, above 88 that of 88; NaN may become anything. The polynomial is
    that of Cephes (S. Moshier, `expf`).
    """
    x = smaller(larger(x, spread(_LOWEST)), spread(_HIGHEST))
    whole = floor(fma(x, spread(_LOG2_E), spread(_HALF)))
    y = fma(whole, spread(-_LN2_LOW), fma(whole, spread(-_LN2_HIGH), x))
    e = fma(spread(_C0), y, spread(_C1))
    e = fma(e, y, spread(_C2))
    e = fma(e, y, spread(_C3))
    e = fma(e, y, spread(_C4))
    e = fma(e, y, spread(_C5))
    e = fma(multiply(e, y), y, add(y, spread(_ONE)))
    return multiply(e, _two_to(whole))


# --- attention -----------------------------------------------------------------------------------
# Below, arrays have one axis and come with where a row of them begins: a view of a row would count
# references, which costs more than many a row's work.


@compiled()
def _capped(x: Lanes, cap: Lanes) -> Lanes:
    """Multiply tanh(x) by the cap."""
    e = exponential(multiply(x, spread(_TWO)))
    one = spread(_ONE)
    return multiply(cap, divide(add(e, spread(-_ONE)), add(e, one)))


@compiled()
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
    cap: _Number,
    scores: Row,
    length: int,
) -> None:
    """Scores of two queries, at `at` and `other`, with positions `first` to `end` of a slot's keys.

    The slot's blocks, (depth, STEP) each, lie in `keys` from `start` on; two are taken together.
    Scores of the second query lie `length` behind those of the first.
    """
    for position in range(first, end, 2 * STEP):
        two = position + STEP < end
        block = start + position * depth
        next_block = block + STEP * depth if two else block
        a = b = c = e = spread(_ZERO)
        for d in range(depth):
            x, y = spread(read(q, at + d)), spread(read(q, other + d))
            k0, k1 = load(keys, block + d * STEP), load(keys, next_block + d * STEP)
            a, b = fma(x, k0, a), fma(x, k1, b)
            c, e = fma(y, k0, c), fma(y, k1, e)
        a, b = multiply(a, scale), multiply(b, scale)
        c, e = multiply(c, scale), multiply(e, scale)
        if cap > _ZERO:
            s = spread(cap)
            a, b, c, e = _capped(a, s), _capped(b, s), _capped(c, s), _capped(e, s)
        store(scores, position, a)
        store(scores, length + position, c)
        if two:
            store(scores, position + STEP, b)
            store(scores, length + position + STEP, e)


@compiled()
def _normalised(scores: Row, at: int, first: int, seen: int, n: int, end: int) -> _Number:
    """Make exponentials of scores, of those not seen too small to count; gives 1 / their sum."""
    for position in range(at + first, at + seen):
        write(scores, position, _HIDDEN)
    for position in range(at + n, at + end):
        write(scores, position, _HIDDEN)
    highest = load(scores, at + first)
    for position in range(at + first + LANES, at + end, LANES):
        highest = larger(highest, load(scores, position))
    minus_top, total = spread(-largest_of(highest)), spread(_ZERO)
    for position in range(at + first, at + end, LANES):
        e = exponential(add(load(scores, position), minus_top))
        store(scores, position, e)
        total = add(total, e)
    return _ONE / sum_of(total)


@compiled()
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
) -> None:
    """Sums of columns of values over positions `seen` to `n`, weighted by two queries' scores.

    A position's columns, `width` apart, lie in `values` from `start` on; the sums are of `STEP` of
    them, and of the `STEP` that are `second` columns behind. Every other position is summed apart.
    The second query's sums lie 2 · STEP behind those of the first in `out`.
    """
    a = b = c = e = spread(_ZERO)
    f = g = h = k = spread(_ZERO)
    whole = seen + (n - seen) // 2 * 2
    for position in range(seen, whole, 2):
        other = length + position
        x, y = spread(read(scores, position)), spread(read(scores, other))
        z, w = spread(read(scores, position + 1)), spread(read(scores, other + 1))
        at = start + position * width
        v0, v1 = load(values, at), load(values, at + second)
        u0, u1 = load(values, at + width), load(values, at + width + second)
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


@compiled()
def _scaled(x: Row, first: int, size: int, factor: _Number, out: Row, at: int) -> None:
    """Write so many numbers from `first` on, times a factor, to `out` from `at` on."""
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, at + i, multiply(load(x, first + i), many))
    for i in range(whole, size):
        write(out, at + i, read(x, first + i) * factor)


@compiled()
def _attend_token(
    row: Row,
    heads: int,
    kv_heads: int,
    depth: int,
    width: int,
    keys: Row,
    values: Row,
    length: int,
    columns: int,
    slot: int,
    position: int,
    scale: _Number,
    softcap: _Number,
    window: int,
    scores: Row,
    part: Row,
    out: Row,
    at: int,
) -> None:
    """Write a token's keys and values into its slot, and attend.

    A row is the token's queries, (heads, depth), keys, (kv heads, depth), and values, (kv heads,
    width), one after the other. The caches `keys` and `values` have `length` positions a slot, as
    in `attend`. `scores`, 2 · length, and `part`, 4 · STEP, are to work in, and `out` is written
    from `at` on, (heads, width).
    """
    repeats = heads // kv_heads
    n = position + 1
    seen = max(0, n - window) if window > 0 else 0
    first, end = seen // STEP * STEP, (n + STEP - 1) // STEP * STEP
    factor = spread(scale / softcap if softcap > 0 else scale)
    for h in range(kv_heads):
        of_keys = (slot * kv_heads + h) * length * depth
        of_values = (slot * kv_heads + h) * length * columns
        newest = of_keys + position // STEP * STEP * depth + position % STEP
        k = (heads + h) * depth
        for d in range(depth):
            write(keys, newest + d * STEP, read(row, k + d))
        v = (heads + kv_heads) * depth + h * width
        _scaled(row, v, width, _ONE, values, of_values + position * columns)
        for r in range(0, repeats, 2):
            head = h * repeats + r
            other = min(head + 1, h * repeats + repeats - 1)
            _score(
                row,
                head * depth,
                other * depth,
                depth,
                keys,
                of_keys,
                first,
                end,
                factor,
                softcap,
                scores,
                length,
            )
            share0 = _normalised(scores, 0, first, seen, n, end)
            share1 = _normalised(scores, length, first, seen, n, end)
            for d in range(0, columns, 2 * STEP):
                second = STEP if d + STEP < columns else 0
                _weigh(scores, length, seen, n, values, of_values + d, columns, second, part)
                size = min(2 * STEP, width - d)
                _scaled(part, 0, size, share0, out, at + head * width + d)
                _scaled(part, 2 * STEP, size, share1, out, at + other * width + d)


_ATTEND = (
    "void(float32[:,:,:], float32[:,:,:], float32[:,:,:], {cache}[:,:,:,:,::1],"
    "{cache}[:,:,:,:,::1], int64[::1], int64[::1], float32, float32, int64, float32[:,:,::1])"
)


@compiled([_ATTEND.format(cache=cache) for cache in ("float32", "uint16")])
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
    """Write tokens' keys and values into their slots, one after the other, and attend.

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
    flat_keys, flat_values, out = keys.reshape(-1), values.reshape(-1), out_T.reshape(-1)
    scores = np.empty(2 * length, np.float32)
    part = np.empty(4 * STEP, np.float32)
    row = np.empty((heads + kv_heads) * depth + kv_heads * width, np.float32)
    for t in range(len(q_T)):
        if slots_T[t] < 0:
            out_T[t] = _ZERO
            continue
        for h in range(heads):
            for d in range(depth):
                row[h * depth + d] = q_T[t, h, d]
        for h in range(kv_heads):
            for d in range(depth):
                row[(heads + h) * depth + d] = k_T[t, h, d]
            for d in range(width):
                row[(heads + kv_heads) * depth + h * width + d] = v_T[t, h, d]
        _attend_token(
            row,
            heads,
            kv_heads,
            depth,
            width,
            flat_keys,
            flat_values,
            length,
            columns,
            slots_T[t],
            positions_T[t],
            scale,
            softcap,
            window,
            scores,
            part,
            out,
            t * heads * width,
        )


# --- rows ----------------------------------------------------------------------------------------


@compiled()
def _product(x: Row, at: int, y: Row, other: int, size: int) -> _Number:
    """The inner product of two rows of so many numbers."""
    whole = size // (2 * LANES) * (2 * LANES)
    a = b = spread(_ZERO)
    for i in range(0, whole, 2 * LANES):
        a = fma(load(x, at + i), load(y, other + i), a)
        b = fma(load(x, at + i + LANES), load(y, other + i + LANES), b)
    total = sum_of(add(a, b))
    for i in range(whole, size):
        total += read(x, at + i) * read(y, other + i)
    return total


@compiled()
def _with_multiple(
    y: Row, at: int, factor: _Number, x: Row, other: int, size: int, out: Row, to: int
) -> None:
    """Out = y + factor · x for rows of so many numbers; it may be y itself."""
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, to + i, fma(many, load(x, other + i), load(y, at + i)))
    for i in range(whole, size):
        out[to + i] = read(y, at + i) + factor * x[other + i]


@compiled()
def _widen(y: Row, at: int, size: int, out: Row, to: int) -> None:
    """Out = y, in float32."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(out, to + i, load(y, at + i))
    for i in range(whole, size):
        out[to + i] = read(y, at + i)


_ROWS = 4
"""Rows that a genome's factor is multiplied with together."""


@compiled()
def _rank_factors(
    x_T_K: Row,
    b_G_R_K: NDArray[np.float32],
    ranks: int,
    genome_of_block: NDArray[np.int64],
    height: int,
) -> Row:
    """What each row multiplies each of its genome's ranks with, x Bᵀ: (rows · ranks,)."""
    rows, inputs = x_T_K.shape
    x, b = x_T_K.reshape(-1), b_G_R_K.reshape(-1)
    out = np.empty(max(1, rows * ranks), np.float32)
    whole = inputs // LANES * LANES
    for block in range(len(genome_of_block)):
        genome = genome_of_block[block] * b_G_R_K.shape[1]
        last = (block + 1) * height - 1
        for r in range(ranks):
            of_b = (genome + r) * inputs
            for t in range(block * height, last + 1, _ROWS):
                # Beyond the block's last row, that row again.
                t1, t2, t3 = min(t + 1, last), min(t + 2, last), min(t + 3, last)
                x0, x1, x2, x3 = t * inputs, t1 * inputs, t2 * inputs, t3 * inputs
                a = c = d = e = spread(_ZERO)
                for i in range(0, whole, LANES):
                    factor = load(b, of_b + i)
                    a, c = fma(load(x, x0 + i), factor, a), fma(load(x, x1 + i), factor, c)
                    d, e = fma(load(x, x2 + i), factor, d), fma(load(x, x3 + i), factor, e)
                s0, s1, s2, s3 = sum_of(a), sum_of(c), sum_of(d), sum_of(e)
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


@compiled()
def _tiles(columns_R: NDArray[np.int64], outputs: int) -> bool:
    """Whether every output is of one rank, in their order."""
    end = 0
    for r in range(len(columns_R)):
        if columns_R[r, 0] != end:
            return False
        end = columns_R[r, 1]
    return end == outputs


@compiled()
def _add_ranks(
    y: Row,
    at: int,
    outputs: int,
    factors: Row,
    first_factor: int,
    a: Row,
    of_a: int,
    stride: int,
    columns_R: NDArray[np.int64],
    tiled: bool,
    out: Row,
    to: int,
) -> None:
    """Out = y + a row's low-rank part: its factors times ranks that lie `stride` apart in `a`."""
    if not tiled:
        _widen(y, at, outputs, out, to)
    for r in range(len(columns_R)):
        first, end = columns_R[r, 0], columns_R[r, 1]
        factor, rank = read(factors, first_factor + r), of_a + r * stride + first
        if tiled:
            _with_multiple(y, at + first, factor, a, rank, end - first, out, to + first)
        else:
            _with_multiple(out, to + first, factor, a, rank, end - first, out, to + first)


_FACTORS = "float32[:,:,::1], float32[:,:,::1], int64[:,::1], int64[::1], int64"
"""Of the arguments a_G_R_N to height, see `add_low_rank`."""


def _of_rows(signature: str) -> list[str]:
    """A signature for rows of each dtype."""
    return [signature.format(rows=rows, factors=_FACTORS) for rows in ("float32", "uint16")]


@compiled(_of_rows("void({rows}[:,::1], {rows}[:,::1], {factors}, float32[:,::1])"))
def add_low_rank(
    y_T_N: Row,
    x_T_K: Row,
    a_G_R_N: NDArray[np.float32],
    b_G_R_K: NDArray[np.float32],
    columns_R: NDArray[np.int64],
    genome_of_block: NDArray[np.int64],
    height: int,
    out_T_N: NDArray[np.float32],
) -> None:
    """Add each row's genome's low-rank part: out = y + (x Bᵀ) A.

    Args:
        y_T_N: (rows, outputs).
        x_T_K: (rows, inputs).
        a_G_R_N: (genomes, ranks, at least as many columns as outputs).
        b_G_R_K: (genomes, ranks, inputs).
        columns_R: first column, and one past the last, that each rank adds to: (ranks, 2).
        genome_of_block: of each block of rows.
        height: rows of a block.
        out_T_N: written; it may be y.
    """
    outputs, ranks = y_T_N.shape[1], len(columns_R)
    of_genome, stride = a_G_R_N.shape[1] * a_G_R_N.shape[2], a_G_R_N.shape[2]
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    factors = _rank_factors(x_T_K, b_G_R_K, ranks, genome_of_block, height)
    tiled = _tiles(columns_R, outputs)
    for t in range(len(y_T_N)):
        at, of_a = t * outputs, genome_of_block[t // height] * of_genome
        _add_ranks(y, at, outputs, factors, t * ranks, a, of_a, stride, columns_R, tiled, out, at)


@compiled()
def _gated(gate: Lanes, up: Lanes) -> Lanes:
    """SiLU(gate) · up."""
    below = add(exponential(multiply(gate, spread(-_ONE))), spread(_ONE))
    return multiply(divide(gate, below), up)


@compiled(_of_rows("void({rows}[:,::1], {rows}[:,::1], {factors}, {rows}[:,::1])"))
def silu_and_multiply(
    y_T_2N: Row,
    x_T_K: Row,
    a_G_R_N: NDArray[np.float32],
    b_G_R_K: NDArray[np.float32],
    columns_R: NDArray[np.int64],
    genome_of_block: NDArray[np.int64],
    height: int,
    out_T_N: Row,
) -> None:
    """Add low-rank parts as `add_low_rank`; out = SiLU(first half) · second half, n at least 16.

    A rank adds to the one half or to the other, those of the first before those of the second.
    Without genomes, `genome_of_block` is empty.
    """
    size, stride = out_T_N.shape[1], a_G_R_N.shape[2]
    ranks = len(columns_R) if len(genome_of_block) else 0
    of_gate = 0
    for r in range(ranks):
        of_gate += columns_R[r, 0] < size
    factors = _rank_factors(x_T_K, b_G_R_K, ranks, genome_of_block, height)
    y, a, out = y_T_2N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    of_a = 0
    for t in range(len(out_T_N)):
        if ranks:
            of_a = genome_of_block[t // height] * a_G_R_N.shape[1] * stride
        of_y, of_out = t * 2 * size, t * size
        if ranks == 2 and of_gate == 1:  # as below, without loops of one round
            f, g = spread(read(factors, 2 * t)), spread(read(factors, 2 * t + 1))
            of_up = of_a + stride + size
            for step in range(0, size, LANES):
                i = min(step, size - LANES)
                gate = fma(f, load(a, of_a + i), load(y, of_y + i))
                up = fma(g, load(a, of_up + i), load(y, of_y + size + i))
                store(out, of_out + i, _gated(gate, up))
            continue
        for step in range(0, size, LANES):
            i = min(step, size - LANES)  # the last ones with some of those before them
            gate, up = load(y, of_y + i), load(y, of_y + size + i)
            for r in range(of_gate):
                factor = spread(read(factors, t * ranks + r))
                gate = fma(factor, load(a, of_a + r * stride + i), gate)
            for r in range(of_gate, ranks):
                factor = spread(read(factors, t * ranks + r))
                up = fma(factor, load(a, of_a + r * stride + size + i), up)
            store(out, of_out + i, _gated(gate, up))


@compiled()
def _normed(x: Row, at: int, size: int, weight: Row, epsilon: _Number, out: Row, to: int) -> None:
    """Out = x / sqrt(mean of x² + epsilon) · weight, of a row; it may be x itself."""
    whole = size // LANES * LANES
    mean = _product(x, at, x, at, size) / np.float32(size)
    factor = _ONE / np.sqrt(mean + epsilon)
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(out, to + i, multiply(multiply(load(x, at + i), many), load(weight, i)))
    for i in range(whole, size):
        out[to + i] = x[at + i] * factor * weight[i]


@compiled("void(float32[:,::1], float32[::1], float32, float32[:,::1])")
def rms_norm(x_T_N: Row, weight_N: Row, epsilon: float, out_T_N: Row) -> None:
    """Out = x / sqrt(mean of x² + epsilon) · weight, a row at a time."""
    size = x_T_N.shape[1]
    x, out = x_T_N.reshape(-1), out_T_N.reshape(-1)
    for t in range(len(x_T_N)):
        _normed(x, t * size, size, weight_N, epsilon, out, t * size)


# --- attention of linear outputs -----------------------------------------------------------------


@compiled()
def _rotate(x: Row, at: int, cos: Row, sin: Row, of_token: int, size: int) -> None:
    """Turn pairs of a row's first `size` numbers, of their halves, by angles from `of_token` on."""
    half = size // 2
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        a, b = load(x, at + i), load(x, at + half + i)
        minus = multiply(b, multiply(load(sin, of_token + i), spread(-_ONE)))
        other = multiply(a, load(sin, of_token + half + i))
        store(x, at + i, fma(a, load(cos, of_token + i), minus))
        store(x, at + half + i, fma(b, load(cos, of_token + half + i), other))
    for i in range(whole, half):
        p, q = x[at + i], x[at + half + i]
        x[at + i] = p * cos[of_token + i] - q * sin[of_token + i]
        x[at + half + i] = q * cos[of_token + half + i] + p * sin[of_token + half + i]


@compiled(
    _of_rows(
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
    outputs, rotary = y_T_N.shape[1], cos_T_D.shape[1]
    ranks = len(columns_R) if len(genome_of_block) else 0
    of_genome, stride = a_G_R_N.shape[1] * a_G_R_N.shape[2], a_G_R_N.shape[2]
    factors = _rank_factors(x_T_K, b_G_R_K, ranks, genome_of_block, height)
    tiled = _tiles(columns_R, outputs)
    y, a, out = y_T_N.reshape(-1), a_G_R_N.reshape(-1), out_T_N.reshape(-1)
    cos, sin = cos_T_D.reshape(-1), sin_T_D.reshape(-1)
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    scores = np.empty(2 * length, np.float32)
    part = np.empty(4 * STEP, np.float32)
    row = np.empty(outputs, np.float32)
    for t in range(len(y_T_N)):
        if slots_T[t] < 0:
            for i in range(heads * depth):
                write(out, t * heads * depth + i, _ZERO)
            continue
        at = t * outputs
        if ranks:
            of_a = genome_of_block[t // height] * of_genome
            _add_ranks(
                y, at, outputs, factors, t * ranks, a, of_a, stride, columns_R, tiled, row, 0
            )
        else:
            _widen(y, at, outputs, row, 0)
        for head in range(heads + kv_heads):
            of_head = head * depth
            if len(q_norm_D):
                weight = q_norm_D if head < heads else k_norm_D
                _normed(row, of_head, depth, weight, epsilon, row, of_head)
            _rotate(row, of_head, cos, sin, t * rotary, rotary)
        _attend_token(
            row,
            heads,
            kv_heads,
            depth,
            depth,
            flat_keys,
            flat_values,
            length,
            columns,
            slots_T[t],
            positions_T[t],
            scale,
            _ZERO,
            window,
            scores,
            part,
            out,
            t * heads * depth,
        )
