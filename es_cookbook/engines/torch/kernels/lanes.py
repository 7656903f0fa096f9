"""Operations on sixteen numbers side by side, for kernels, and how kernels compile.

LLVM's vectoriser may add in another order anywhere, and leaves loops of a few dozen
numbers scalar; with these a kernel says itself which numbers are added in which order, so a row's
bits are the same on every processor and in every batch. They compute in float32, read rows of
float32, of bfloat16, which NumPy knows as `uint16`, and of float16, and write the first two.
`load(row, i)` or `fma(a, b, c)` can be called in kernels only.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic
from numpy.typing import NDArray

from es_cookbook.evolution.noise.compiled import compiled

LANES = 16
"""Numbers that an operation works on: a register of AVX-512, two of AVX, four of NEON."""
FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)
_HALF_BITS = 16
_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
SOURCES = hashlib.blake2b(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))),
    digest_size=4,
).hexdigest()
"""Kernels use those of other modules here: when one changes, all are recompiled."""


def kernel(
    signature: str | list[str] | None = None, *, inline: bool = False
) -> Callable[[_Kernel], _Kernel]:
    """Make a kernel: machine code without the interpreter's lock, kept on disk.

    Args:
        signature: numba signature of the kernel's arguments, or several, compiled when its module
            is imported; None for what kernels call.
        inline: put the code of what kernels call into theirs, where passing two dozen arguments
            takes as long as the work.
    """
    if signature is None:
        made = numba.njit(error_model="numpy", forceinline=inline)
        return cast("Callable[[_Kernel], _Kernel]", made)
    return compiled(signature, version=SOURCES)


class Lanes:
    """Sixteen numbers, for type checkers: a kernel's variable, never an object."""


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _LanesType()


class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


register_default(_LanesType)(_LanesModel)


_Emit = Callable[[Any, Any, Any, Sequence[Any]], Any]
"""Adds an operation's code: (context, builder, signature, arguments) -> its value."""


def _emit(build: Callable[..., Any]) -> _Emit:
    """Return the code of an operation that needs its arguments' values only."""
    return lambda _context, builder, _signature, values: build(builder, *values)


def _operation(arguments: int, build: Callable[..., Any]) -> Any:
    """Make an operation whose arguments and result are lanes."""
    emit = _emit(build)

    def of_three(_: Any, a: Any, b: Any, c: Any) -> tuple[Any, _Emit]:
        return _lanes(a, b, c), emit

    def of_two(_: Any, a: Any, b: Any) -> tuple[Any, _Emit]:
        return _lanes(a, b), emit

    def of_one(_: Any, a: Any) -> tuple[Any, _Emit]:
        return _lanes(a), emit

    return intrinsic([of_one, of_two, of_three][arguments - 1])


def call_llvm(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _llvm(name: str, arguments: int) -> Any:
    """Make an operation of one of LLVM's own functions on vectors."""

    def build(builder: Any, *values: Any) -> Any:
        return call_llvm(builder, name, FLOATS, *values)

    return _operation(arguments, build)


def index_of(number: int) -> Any:
    """Return a constant index."""
    return ir.Constant(ir.IntType(64), number)


_NARROW = (types.uint16, types.int16)
"""Stand-ins for bfloat16 and float16 in numba, which lacks them on the CPU."""


def pointer_to(context: Any, builder: Any, kind: Any, array: Any, index: Any, what: Any) -> Any:
    """Emit the address of an array's element, as a pointer to another type."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), what.as_pointer())


def _constant(kind: Any, number: int) -> Any:
    """Return a constant of an integer type, or a vector of it."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def widened(builder: Any, dtype: Any, shorts: Any, ints: Any, floats: Any) -> Any:
    """Emit float32 from bfloat16, or from float16 if that is what the dtype stands for."""
    if dtype == types.int16:
        return _extended(builder, builder.zext(shorts, ints), ints, floats)
    shifted = builder.shl(builder.zext(shorts, ints), _constant(ints, _HALF_BITS))
    return builder.bitcast(shifted, floats)


def _extended(builder: Any, bits: Any, ints: Any, floats: Any) -> Any:
    """Emit float32 from float16, by shifts and one exact product, which all processors have."""
    magnitude = builder.shl(builder.and_(bits, _constant(ints, 0x7FFF)), _constant(ints, 13))
    scale = builder.bitcast(_constant(ints, (_EXPONENT_BIAS + 112) << _MANTISSA_BITS), floats)
    scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, floats), scale), ints)
    is_finite = builder.icmp_unsigned("<", magnitude, _constant(ints, 0x7C00 << 13))
    endless = builder.or_(magnitude, _constant(ints, 0xFF << _MANTISSA_BITS))
    sign = builder.shl(builder.and_(bits, _constant(ints, 0x8000)), _constant(ints, 16))
    return builder.bitcast(builder.or_(builder.select(is_finite, scaled, endless), sign), floats)


def _rounded(builder: Any, floats: Any, ints: Any, shorts: Any) -> Any:
    """Emit the nearest bfloat16, ties to even."""
    bits = builder.bitcast(floats, ints)
    odd = builder.and_(builder.lshr(bits, _constant(ints, _HALF_BITS)), _constant(ints, 1))
    up = builder.add(builder.add(bits, _constant(ints, (1 << (_HALF_BITS - 1)) - 1)), odd)
    return builder.trunc(builder.lshr(up, _constant(ints, _HALF_BITS)), shorts)


_VECTORS = FLOATS, INTS, SHORTS
SCALARS = ir.FloatType(), ir.IntType(32), ir.IntType(16)


def loaded(
    context: Any, builder: Any, kind: Any, array: Any, index: Any, kinds: Any = _VECTORS
) -> Any:
    """Load a vector of an array from an index on, in float32."""
    floats, ints, shorts = kinds
    narrow = kind.dtype in _NARROW
    what = shorts if narrow else floats
    place = pointer_to(context, builder, kind, array, index, what)
    found = builder.load(place, align=2 if narrow else 4)
    return widened(builder, kind.dtype, found, ints, floats) if narrow else found


def _reader(result: Any, kinds: tuple[Any, Any, Any]) -> Any:
    """Make an operation that reads a 1-D array from an index on; rows may begin anywhere."""

    def read(_: Any, array: Any, index: Any) -> tuple[Any, _Emit]:
        def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            array, index = values
            return loaded(context, builder, signature.args[0], array, index, kinds)

        return result(array, types.intp), emit

    return intrinsic(read)


def _writer(kinds: tuple[Any, Any, Any]) -> Any:
    """Make an operation that writes to a 1-D array from an index on; not to float16."""
    floats, ints, shorts = kinds

    def write(_: Any, array: Any, index: Any, value: Any) -> tuple[Any, _Emit]:
        narrow = array.dtype == types.uint16

        def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            what = shorts if narrow else floats
            array, index, value = values
            place = pointer_to(context, builder, signature.args[0], array, index, what)
            written = _rounded(builder, value, ints, shorts) if narrow else value
            builder.store(written, place, align=2 if narrow else 4)
            return context.get_dummy_value()

        return types.void(array, types.intp, value), emit

    return intrinsic(write)


def fetch(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> None:
    """Prefetch the memory at an index of an array, without waiting for it."""
    what, number = ir.IntType(8), ir.IntType(32)
    place = pointer_to(context, builder, kind, array, index, what)
    how = [ir.Constant(number, n) for n in (0, 3, 1)]
    call_llvm(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, *how)


def _prefetch(_: Any, array: Any, index: Any) -> tuple[Any, _Emit]:
    """Emit `fetch`, for kernels."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        fetch(context, builder, signature.args[0], *values)
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


def in_all(builder: Any, number: Any, kind: Any) -> Any:
    """Emit a vector with one number in all lanes."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
    firsts = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, nothing, firsts)


def _spread(_: Any, number: Any) -> tuple[Any, _Emit]:
    """Emit a vector with one number in all lanes."""
    return _lanes(types.float32), _emit(partial(in_all, kind=FLOATS))


def _among(_: Any, lanes: Any, first: Any, end: Any, otherwise: Any) -> tuple[Any, _Emit]:
    """Keep the lanes from `first` to `end`, and set the others to one number."""

    def build(builder: Any, lanes: Any, first: Any, end: Any, otherwise: Any) -> Any:
        index = ir.Constant(INTS, list(range(LANES)))
        low, high = (in_all(builder, builder.trunc(n, ir.IntType(32)), INTS) for n in (first, end))
        above = builder.icmp_signed(">=", index, low)
        inside = builder.and_(above, builder.icmp_signed("<", index, high))
        return builder.select(inside, lanes, in_all(builder, otherwise, FLOATS))

    return _lanes(lanes, types.intp, types.intp, types.float32), _emit(build)


def _halved(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Make an operation that reduces lanes to one number, halving their number at each step."""

    def build(builder: Any, left: Any) -> Any:
        index, width = ir.IntType(32), LANES
        while width > 1:
            width //= 2
            nothing, kind = ir.Constant(left.type, ir.Undefined), ir.VectorType(index, width)
            places = (ir.Constant(kind, list(range(at, at + width))) for at in (0, width))
            halves = [builder.shuffle_vector(left, nothing, place) for place in places]
            left = combine(builder, *halves)
        return builder.extract_element(left, ir.Constant(index, 0))

    def reduce(_: Any, lanes: Any) -> tuple[Any, _Emit]:
        return types.float32(lanes), _emit(build)

    return intrinsic(reduce)


def _power_of_two(builder: Any, exponent: Any) -> Any:
    """Emit 2 to the power of whole numbers from -126 to 127."""
    biased = builder.add(builder.fptosi(exponent, INTS), _constant(INTS, _EXPONENT_BIAS))
    return builder.bitcast(builder.shl(biased, _constant(INTS, _MANTISSA_BITS)), FLOATS)


def _choice(relation: str) -> Callable[[Any, Any, Any], Any]:
    """Return code that picks the first of two values where the relation holds, else the second."""
    return lambda builder, a, b: builder.select(builder.fcmp_ordered(relation, a, b), a, b)


Row: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
Number: TypeAlias = float | np.floating[Any]
_Unary: TypeAlias = Callable[[Lanes], Lanes]
_Binary: TypeAlias = Callable[[Lanes, Lanes], Lanes]

load = cast("Callable[[Row, int], Lanes]", _reader(_lanes, _VECTORS))
"""Neighbours of a contiguous array of one axis, from an index on."""
store = cast("Callable[[Row, int, Lanes], None]", _writer(_VECTORS))
read = cast("Callable[[Row, int], Number]", _reader(types.float32, SCALARS))
"""One number of it."""
write = cast("Callable[[Row, int, Number], None]", _writer(SCALARS))
prefetch = cast("Callable[[Row, int], None]", intrinsic(_prefetch))
spread = cast("Callable[[Number], Lanes]", intrinsic(_spread))
among = cast("Callable[[Lanes, int, int, Number], Lanes]", intrinsic(_among))
sum_of = cast("Callable[[Lanes], Number]", _halved(ir.IRBuilder.fadd))
largest_of = cast("Callable[[Lanes], Number]", _halved(_choice(">")))
add: _Binary = _operation(2, ir.IRBuilder.fadd)
multiply: _Binary = _operation(2, ir.IRBuilder.fmul)
divide: _Binary = _operation(2, ir.IRBuilder.fdiv)
larger: _Binary = _operation(2, _choice(">"))
smaller: _Binary = _operation(2, _choice("<"))
floor: _Unary = _llvm(f"llvm.floor.v{LANES}f32", 1)
fma: Callable[[Lanes, Lanes, Lanes], Lanes] = _llvm(f"llvm.fma.v{LANES}f32", 3)
"""a · b + c, rounded once."""
_two_to: _Unary = _operation(1, _power_of_two)

ZERO, _HALF, ONE, TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3))
_C3, _C4, _C5 = map(np.float32, (4.1665795894e-2, 1.6666665459e-1, 0.50000001201))


@kernel()
def exponential(x: Lanes) -> Lanes:
    """Return the natural exponential of each lane, to about one unit in the last place.

    Below -87 it is that of -87, above 88 that of 88; NaN may become anything. The polynomial is
    that of Cephes (S. Moshier, `expf`).
    """
    x = smaller(larger(x, spread(_LOWEST)), spread(_HIGHEST))
    whole = floor(fma(x, spread(_LOG2_E), spread(_HALF)))
    # y = x - whole · ln 2
    y = fma(whole, spread(-_LN2_LOW), fma(whole, spread(-_LN2_HIGH), x))
    series = fma(spread(_C0), y, spread(_C1))  # ((c0 y + c1) y + c2) …
    series = fma(series, y, spread(_C2))
    series = fma(series, y, spread(_C3))
    series = fma(series, y, spread(_C4))
    series = fma(series, y, spread(_C5))
    series = fma(multiply(series, y), y, add(y, spread(ONE)))  # eʸ = 1 + y + y² · series
    return multiply(series, _two_to(whole))  # eˣ = 2ʷ eʸ
