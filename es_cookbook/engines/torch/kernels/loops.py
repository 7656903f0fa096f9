"""Loops that numba compiles for the CPU, in float32: attention over a slot cache, and work on rows.

They are written with operations on eight numbers side by side. LLVM's vectoriser may add in another
order wherever it likes, and leaves loops of a few dozen numbers scalar; here a kernel says itself
which numbers are added in which order, so a row's bits are the same on every processor and in every
batch. The operations, `load(row, i)` or `fma(a, b, c)`, are a kernel's own: nobody else calls them.

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

LANES = 8
"""Numbers that an operation works on: a register of AVX, two of NEON, half one of AVX-512."""
STEP = 2 * LANES
"""Positions, and columns of values, that attention works on together: a cache has multiples."""
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_ALIGNMENT = 4  # rows may begin at any number
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


def compiled(signature: str | None = None) -> Callable[[_Kernel], _Kernel]:
    """A kernel: machine code without the interpreter's lock, kept on disk for the next process.

    Args:
        signature: of a kernel's arguments in numba's words, compiled when this module is imported;
            None for what kernels call.
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
    """Eight numbers, for type checkers: a kernel's variable, never an object."""


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


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _FLOATS.as_pointer())


def _load(_: Any, array: Any, index: Any) -> tuple[Any, _Emit]:
    """Eight neighbours of a contiguous array of one axis, from an index on."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        return builder.load(
            _pointer(context, builder, signature.args[0], *values), align=_ALIGNMENT
        )

    return _lanes(array, types.intp), emit


def _store(_: Any, array: Any, index: Any, value: Any) -> tuple[Any, _Emit]:
    """Write eight neighbours of a contiguous array of one axis, from an index on."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], pointer, align=_ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), emit


def _spread(_: Any, number: Any) -> tuple[Any, _Emit]:
    """One number in all lanes."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
        nothing, index = ir.Constant(_FLOATS, ir.Undefined), ir.IntType(32)
        first = builder.insert_element(nothing, values[0], ir.Constant(index, 0))
        zeros = ir.Constant(ir.VectorType(index, LANES), [0] * LANES)
        return builder.shuffle_vector(first, nothing, zeros)

    return _lanes(types.float32), emit


def _sum(_: Any, lanes: Any) -> tuple[Any, _Emit]:
    """The sum of all lanes, first to last."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
        parts = [
            builder.extract_element(values[0], ir.Constant(ir.IntType(32), i)) for i in range(LANES)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = builder.fadd(total, part)
        return total

    return types.float32(lanes), emit


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


Row: TypeAlias = NDArray[np.float32]
_Number: TypeAlias = float | np.floating[Any]
_OfOne: TypeAlias = Callable[[Lanes], Lanes]
_OfTwo: TypeAlias = Callable[[Lanes, Lanes], Lanes]

load = cast("Callable[[Row, int], Lanes]", intrinsic(_load))
store = cast("Callable[[Row, int, Lanes], None]", intrinsic(_store))
spread = cast("Callable[[_Number], Lanes]", intrinsic(_spread))
sum_of = cast("Callable[[Lanes], _Number]", intrinsic(_sum))
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


@compiled()
def _capped(x: Lanes, cap: Lanes) -> Lanes:
    """Multiply tanh(x) by the cap."""
    e = exponential(multiply(x, spread(_TWO)))
    one = spread(_ONE)
    return multiply(cap, divide(add(e, spread(-_ONE)), add(e, one)))


@compiled()
def _score(
    q: Row, keys: Row, start: int, first: int, end: int, scale: Lanes, cap: _Number, scores: Row
) -> None:
    """Scores of two rows of queries (2, d) with positions `first` to `end` of a slot's keys.

    The slot's blocks, (d, STEP) each, lie in `keys` from `start` on.
    """
    q0, q1, row0, row1 = q[0], q[1], scores[0], scores[1]
    width = len(q0)
    for position in range(first, end, STEP):
        a = b = c = e = spread(_ZERO)
        block = start + position * width
        for d in range(width):
            x, y = spread(q0[d]), spread(q1[d])
            k0, k1 = load(keys, block + d * STEP), load(keys, block + d * STEP + LANES)
            a, b = fma(x, k0, a), fma(x, k1, b)
            c, e = fma(y, k0, c), fma(y, k1, e)
        a, b = multiply(a, scale), multiply(b, scale)
        c, e = multiply(c, scale), multiply(e, scale)
        if cap > _ZERO:
            s = spread(cap)
            a, b, c, e = _capped(a, s), _capped(b, s), _capped(c, s), _capped(e, s)
        store(row0, position, a)
        store(row0, position + LANES, b)
        store(row1, position, c)
        store(row1, position + LANES, e)


@compiled()
def _normalised(row: Row, first: int, seen: int, n: int, end: int) -> _Number:
    """Make exponentials of scores, of those not seen too small to count; gives 1 / their sum."""
    for position in range(first, seen):
        row[position] = _HIDDEN
    for position in range(n, end):
        row[position] = _HIDDEN
    highest = load(row, first)
    for position in range(first + LANES, end, LANES):
        highest = larger(highest, load(row, position))
    store(row, end, highest)
    top = row[end]
    for i in range(1, LANES):
        top = max(top, row[end + i])
    minus_top, total = spread(-top), spread(_ZERO)
    for position in range(first, end, LANES):
        e = exponential(add(load(row, position), minus_top))
        store(row, position, e)
        total = add(total, e)
    return _ONE / sum_of(total)


@compiled()
def _weigh(scores: Row, seen: int, n: int, values: Row, start: int, width: int, out: Row) -> None:
    """Sums of `STEP` columns of values over positions `seen` to `n`, weighted by two rows' scores.

    A position's columns, `width` apart, lie in `values` from `start` on.
    """
    row0, row1 = scores[0], scores[1]
    a = b = c = e = spread(_ZERO)
    for position in range(seen, n):
        x, y = spread(row0[position]), spread(row1[position])
        v0 = load(values, start + position * width)
        v1 = load(values, start + position * width + LANES)
        a, b = fma(x, v0, a), fma(x, v1, b)
        c, e = fma(y, v0, c), fma(y, v1, e)
    store(out[0], 0, a)
    store(out[0], LANES, b)
    store(out[1], 0, c)
    store(out[1], LANES, e)


@compiled(
    "void(float32[:,:,:], float32[:,:,:], float32[:,:,:], float32[:,:,:,:,::1],"
    "float32[:,:,:,:,::1],"
    "int64[::1], int64[::1], float32, float32, int64, float32[:,:,::1])"
)
def attend(
    q_T: NDArray[np.float32],
    k_T: NDArray[np.float32],
    v_T: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
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
    heads, kv_heads, width = q_T.shape[1], k_T.shape[1], v_T.shape[2]
    repeats, columns, depth = heads // kv_heads, values.shape[4], q_T.shape[2]
    length = keys.shape[2] * STEP
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    scores = np.empty((2, length + LANES), np.float32)
    part = np.empty((2, STEP), np.float32)
    pair = np.empty((2, depth), np.float32)
    factor = spread(scale / softcap if softcap > 0 else scale)
    for t in range(len(q_T)):
        slot, position = slots_T[t], positions_T[t]
        if slot < 0:
            out_T[t] = _ZERO
            continue
        n = position + 1
        seen = max(0, n - window) if window > 0 else 0
        first, end = seen // STEP * STEP, (n + STEP - 1) // STEP * STEP
        for h in range(kv_heads):
            of_keys = (slot * kv_heads + h) * length * depth
            of_values = (slot * kv_heads + h) * length * columns
            newest = of_keys + position // STEP * STEP * depth + position % STEP
            for d in range(depth):
                flat_keys[newest + d * STEP] = k_T[t, h, d]
            for d in range(width):
                flat_values[of_values + position * columns + d] = v_T[t, h, d]
            for r in range(0, repeats, 2):
                head = h * repeats + r
                other = min(head + 1, h * repeats + repeats - 1)
                for d in range(depth):
                    pair[0, d] = q_T[t, head, d]
                    pair[1, d] = q_T[t, other, d]
                _score(pair, flat_keys, of_keys, first, end, factor, softcap, scores)
                share0 = _normalised(scores[0], first, seen, n, end)
                share1 = _normalised(scores[1], first, seen, n, end)
                for d in range(0, columns, STEP):
                    _weigh(scores, seen, n, flat_values, of_values + d, columns, part)
                    for i in range(min(STEP, width - d)):
                        out_T[t, head, d + i] = part[0, i] * share0
                        out_T[t, other, d + i] = part[1, i] * share1


# --- rows ----------------------------------------------------------------------------------------


@compiled()
def _product(x: Row, y: Row) -> _Number:
    """The inner product of two rows of one length."""
    size = len(x)
    whole = size // (2 * LANES) * (2 * LANES)
    a = b = spread(_ZERO)
    for i in range(0, whole, 2 * LANES):
        a = fma(load(x, i), load(y, i), a)
        b = fma(load(x, i + LANES), load(y, i + LANES), b)
    total = sum_of(add(a, b))
    for i in range(whole, size):
        total += x[i] * y[i]
    return total


@compiled()
def _add_multiple(y: Row, factor: _Number, x: Row) -> None:
    """Y += factor · x, in place."""
    size = len(y)
    whole = size // LANES * LANES
    many = spread(factor)
    for i in range(0, whole, LANES):
        store(y, i, fma(many, load(x, i), load(y, i)))
    for i in range(whole, size):
        y[i] += factor * x[i]


@compiled(
    "void(float32[:,::1], float32[:,::1], float32[:,:,::1], float32[:,:,::1], int64[:,::1],"
    "int64[::1], int64)"
)
def add_low_rank(
    y_T_N: Row,
    x_T_K: Row,
    a_G_R_N: Row,
    b_G_R_K: Row,
    columns_R: NDArray[np.int64],
    genome_of_block: NDArray[np.int64],
    height: int,
) -> None:
    """Add each row's genome's low-rank part: y += (x Bᵀ) A, in place.

    Args:
        y_T_N: (rows, outputs), written.
        x_T_K: (rows, inputs).
        a_G_R_N: (genomes, ranks, at least as many columns as outputs).
        b_G_R_K: (genomes, ranks, inputs).
        columns_R: first column, and one past the last, that each rank adds to: (ranks, 2).
        genome_of_block: of each block of rows.
        height: rows of a block.
    """
    for t in range(len(y_T_N)):
        genome = genome_of_block[t // height]
        for r in range(len(columns_R)):
            first, end = columns_R[r]
            factor = _product(x_T_K[t], b_G_R_K[genome, r])
            _add_multiple(y_T_N[t, first:end], factor, a_G_R_N[genome, r, first:end])


@compiled()
def _gated(gate: Lanes, up: Lanes) -> Lanes:
    """SiLU(gate) · up."""
    below = add(exponential(multiply(gate, spread(-_ONE))), spread(_ONE))
    return multiply(divide(gate, below), up)


@compiled("void(float32[:,::1], float32[:,::1])")
def silu_and_multiply(y_T_2N: Row, out_T_N: Row) -> None:
    """Out = SiLU(y's first half) · its second half: (rows, 2 · n) -> (rows, n), n at least 8."""
    size = out_T_N.shape[1]
    whole = size // LANES * LANES
    for t in range(len(out_T_N)):
        y, out = y_T_2N[t], out_T_N[t]
        for i in range(0, whole, LANES):
            store(out, i, _gated(load(y, i), load(y, size + i)))
        if whole < size:  # the last ones again, with those beside them
            i = size - LANES
            store(out, i, _gated(load(y, i), load(y, size + i)))


@compiled("void(float32[:,::1], float32[::1], float32, float32[:,::1])")
def rms_norm(x_T_N: Row, weight_N: Row, epsilon: float, out_T_N: Row) -> None:
    """Out = x / sqrt(mean of x² + epsilon) · weight, a row at a time."""
    size = x_T_N.shape[1]
    whole = size // LANES * LANES
    for t in range(len(x_T_N)):
        x, out = x_T_N[t], out_T_N[t]
        mean = _product(x, x) / np.float32(size)
        factor = _ONE / np.sqrt(mean + epsilon)
        many = spread(factor)
        for i in range(0, whole, LANES):
            store(out, i, multiply(multiply(load(x, i), many), load(weight_N, i)))
        for i in range(whole, size):
            out[i] = x[i] * factor * weight_N[i]
