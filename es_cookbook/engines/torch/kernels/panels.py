"""Building blocks of matrix products: transposing weights, and tiles of sums.

A tile is some outputs of a few rows, whose sums stay in registers while the inputs go by. Outputs
lie side by side in a register, and a number of a row is in all lanes of another. So weights have to
lie by input, but rows and sums as they are, for any number of rows: one row reads the weights
once, and many turn them once. Each sum is one chain of fused products in the order of the inputs,
so it has the same bits for any tile size, on every processor. LLVM is given the whole loop:
left to find it, it would keep the sums in memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    FLOATS,
    LANES,
    SCALARS,
    Lanes,
    Row,
    call_llvm,
    fetch,
    in_all,
    index_of,
    loaded,
    pointer_to,
    widened,
)
from es_cookbook.evolution.noise.compiled import features

_HAS_512_BITS = "+avx512f" in features()
_WIDTH, _SUMS, _ROWS = (16, 24, 8) if _HAS_512_BITS else (8, 12, 4)
"""Numbers of a register, registers that hold a tile's sums, and most rows of a tile.

24 of AVX-512's 32 registers of 16 numbers hold sums, 12 of AVX2's 16 of 8, 12 pairs of NEON's 32
of 4.
"""
PANEL = 16
"""Outputs that are turned together."""
OUTPUTS = 3 * PANEL
"""Outputs of tiles; the last tiles of a product have fewer panels."""
DEPTH = 96
"""Inputs that tiles go through at a time: as many transposed weights take half of the L1 cache."""
LINE = 64
"""Bytes of a row of weights that come from memory together, and are turned together."""

_FLOAT = ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, _WIDTH), ir.VectorType(ir.IntType(32), _WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), _WIDTH)
_Floats: TypeAlias = NDArray[np.float32]
Places: TypeAlias = tuple[_Floats, int, int]
"""Rows of an array of one axis: where the first begins, and how far apart they are."""


def register_at(builder: Any, place: Any, offset: int, floats: Any = _FLOATS) -> Any:
    """Emit the address of a register's numbers, `offset` of them after a place."""
    return builder.bitcast(builder.gep(place, [index_of(offset)]), floats.as_pointer())


class Rows(NamedTuple):
    """`Places` in LLVM's code."""

    first: Any
    stride: Any

    @classmethod
    def unpacked(cls, context: Any, builder: Any, kind: Any, places: Any) -> "Rows":
        array, first, stride = cgutils.unpack_tuple(builder, places)
        return cls(pointer_to(context, builder, kind[0], array, first, _FLOAT), stride)

    def some(self, builder: Any, t: Any, count: int) -> list[Any]:
        """Emit the addresses of `count` rows, from row `t` on."""
        rows = [builder.add(t, index_of(i)) for i in range(count)]
        return [builder.gep(self.first, [builder.mul(row, self.stride)]) for row in rows]


def each_tile(
    builder: Any,
    places: Sequence[Rows],
    rows: Any,
    most: int,
    tile: Callable[[Sequence[list[Any]]], None],
) -> None:
    """Emit tiles of all rows: of as many as one may have, of half of these, and so on.

    `tile` gets where its rows begin, for each of the places.
    """
    done, count = index_of(0), most
    while count:
        tiles = builder.udiv(builder.sub(rows, done), index_of(count))
        with cgutils.for_range(builder, tiles) as loop:
            t = builder.add(done, builder.mul(loop.index, index_of(count)))
            tile([each.some(builder, t, count) for each in places])
        done = builder.add(done, builder.mul(tiles, index_of(count)))
        count //= 2


def _add_products(
    _: Any, x: Any, weights: Any, depth: Any, begun: Any, y: Any, shape: Any
) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        kinds = signature.args
        places = [Rows.unpacked(context, builder, kinds[n], values[n]) for n in (0, 3, 4)]
        w = pointer_to(context, builder, kinds[1], values[1], index_of(0), _FLOAT)
        depth, (rows, outputs) = values[2], cgutils.unpack_tuple(builder, values[5])
        for width in range(PANEL, OUTPUTS + 1, PANEL):
            with builder.if_then(builder.icmp_signed("==", outputs, index_of(width))):
                tile = partial(_tile, builder, w=w, depth=depth, width=width)
                each_tile(builder, places, rows, _ROWS, tile)
        return context.get_dummy_value()

    return types.void(x, weights, types.intp, begun, y, shape), emit


def _fits(columns: int, rows: int) -> bool:
    """Return whether a register is left for one number, beside the sums and an input's weights."""
    return columns * rows <= _SUMS and columns * (rows + 1) < (32 if _HAS_512_BITS else 16)


def _tile(builder: Any, places: Sequence[list[Any]], w: Any, depth: Any, width: int) -> None:
    """Emit `width` outputs of some rows, as many at a time as registers hold."""
    x_T, begun_T, y_T = places
    at_once = next(
        n for n in range(width, 0, -_WIDTH) if not width % n and _fits(n // _WIDTH, len(x_T))
    )
    for first in range(0, width, at_once):
        offsets = range(first, first + at_once, _WIDTH)
        more = partial(_with_input, builder, x_T, w, offsets)
        sum_up(builder, (begun_T, y_T), (offsets, _FLOATS), depth, more)


def sum_up(
    builder: Any,
    rows: tuple[list[Any], list[Any]],
    registers: tuple[Sequence[int], Any],
    count: Any,
    more: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> None:
    """Emit the sums of some rows' outputs, kept in registers for `count` steps.

    Args:
        builder: builder of the code.
        rows: where the rows of initial sums begin, and those of the results.
        registers: offsets of registers within a row, and their type.
        count: number of steps.
        more: as in `in_registers`.
    """
    offsets, floats = registers
    begun, ends = (
        [register_at(builder, row, n, floats) for row in rows_T for n in offsets] for rows_T in rows
    )
    first = [builder.load(each, align=4) for each in begun]
    for total, end in zip(in_registers(builder, first, count, more), ends, strict=True):
        builder.store(total, end, align=4)


def in_registers(
    builder: Any,
    begun: Sequence[Any],
    count: Any,
    more: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """Emit sums that stay in registers while `count` steps add to them.

    Args:
        builder: builder of the code.
        begun: initial sums, a register each.
        count: number of steps.
        more: (number of the step, sums before it) -> sums after it.
    """
    before, loop = builder.block, builder.append_basic_block("steps")
    done = builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", index_of(0), count), loop, done)
    builder.position_at_end(loop)
    step = builder.phi(ir.IntType(64))
    step.add_incoming(index_of(0), before)
    sums = [builder.phi(each.type) for each in begun]
    added = more(step, sums)
    last, following = builder.block, builder.add(step, index_of(1))
    step.add_incoming(following, last)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    totals: list[Any] = []
    for phi, start, total in zip(sums, begun, added, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(total, last)
        found = builder.phi(total.type)
        found.add_incoming(start, before)
        found.add_incoming(total, last)
        totals.append(found)
    return totals


def _with_input(
    builder: Any, x_T: Sequence[Any], w: Any, offsets: range, k: Any, sums: Sequence[Any]
) -> Sequence[Any]:
    """Emit the addition of one input's products to sums."""
    here = builder.gep(w, [builder.mul(k, index_of(OUTPUTS))])
    weights = [builder.load(register_at(builder, here, n), align=4) for n in offsets]
    numbers = [in_all(builder, builder.load(builder.gep(row, [k])), _FLOATS) for row in x_T]
    return _with_products(builder, numbers, weights, sums)


def _with_products(
    builder: Any, numbers: Sequence[Any], weights: Sequence[Any], sums: Sequence[Any]
) -> list[Any]:
    """Emit sums + number · weight for each pair, rounded once."""
    pairs = [(number, weight) for number in numbers for weight in weights]
    name = f"llvm.fma.v{weights[0].type.count}f32"
    return [
        call_llvm(builder, name, total.type, *pair, total)
        for pair, total in zip(pairs, sums, strict=True)
    ]


def _turn(
    _: Any, weights: Any, at: Any, stride: Any, out: Any, to: Any
) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        (weights, at, stride, out, to), kind = values, signature.args[0]
        place = pointer_to(context, builder, signature.args[3], out, to, _FLOAT)
        inputs = LINE * 8 // kind.dtype.bitwidth
        of_register = inputs * _WIDTH * 4 // LINE
        for n in range(0, PANEL, _WIDTH):
            outputs = [builder.mul(stride, index_of(n + i)) for i in range(_WIDTH)]
            for k in range(0, inputs, of_register):
                first = builder.add(at, index_of(k))
                starts = [builder.add(first, output) for output in outputs]
                rows = [
                    pointer_to(context, builder, kind, weights, start, _INTS) for start in starts
                ]
                by_input = _by_input(builder, kind.dtype, rows)
                for i, floats in enumerate(by_input, k):
                    builder.store(floats, register_at(builder, place, i * OUTPUTS + n), align=4)
        return context.get_dummy_value()

    del at, stride, to
    return types.void(weights, *[types.intp] * 2, out, types.intp), emit


def _by_input(builder: Any, dtype: Any, rows: Sequence[Any]) -> list[Any]:
    """Load a register from each row (an output), and transpose them: by input, in float32."""
    ints = [builder.load(row, align=2) for row in rows]
    columns = _turned(builder, ints)
    return [floats for column in columns for floats in _floats(builder, dtype, column)]


def _floats(builder: Any, dtype: Any, ints: Any) -> list[Any]:
    """Emit the numbers in each 32 bits, in float32: one, or two, the lower first."""
    if dtype == types.float32:
        return [builder.bitcast(ints, _FLOATS)]
    both = ints, builder.lshr(ints, ir.Constant(_INTS, [16] * _WIDTH))
    shorts = [builder.trunc(each, _SHORTS) for each in both]
    return [widened(builder, dtype, each, _INTS, _FLOATS) for each in shorts]


def _picked(builder: Any, pair: Sequence[Any], picks: Sequence[int]) -> Any:
    return builder.shuffle_vector(*pair, ir.Constant(_INTS, picks))


def _turned(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Transpose as many rows as a register has numbers.

    Four rows at a time within each four of their numbers, and then fours of numbers: what moves
    within 128 bits, and whole 128 bits, is one instruction of x86.
    """
    by_column = [_fours(builder, rows[i : i + 4]) for i in range(0, _WIDTH, 4)]
    columns = [_quads(builder, same) for same in zip(*by_column, strict=True)]
    return [of_quads[quad] for quad in range(_WIDTH // 4) for of_quads in columns]


def _fours(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Turn four rows into four columns, in each four of their numbers."""

    def picks(*of_four: int) -> list[int]:
        """Return places in two registers, from those in two fours."""
        return [
            four + (n if n < 4 else n - 4 + _WIDTH) for four in range(0, _WIDTH, 4) for n in of_four
        ]

    a, b, c, d = rows
    columns: list[Any] = []
    for numbers in (picks(0, 4, 1, 5), picks(2, 6, 3, 7)):
        pair = _picked(builder, (a, b), numbers), _picked(builder, (c, d), numbers)
        columns += [_picked(builder, pair, picks(*two)) for two in ((0, 1, 4, 5), (2, 3, 6, 7))]
    return columns


def _quads(builder: Any, rows: Sequence[Any]) -> Sequence[Any]:
    """Transpose rows of fours of numbers, as many rows as fours in a row."""
    if len(rows) == 1:
        return rows
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    halves: list[Sequence[Any]] = []
    for first in (0, 4):  # the even fours, then the odd ones
        picks = [four + n for four in range(first, 2 * _WIDTH, 8) for n in range(4)]
        halves.append(_quads(builder, [_picked(builder, pair, picks) for pair in pairs]))
    return [row for pair in zip(*halves, strict=True) for row in pair]


_AddProducts = Callable[[Places, _Floats, int, Places, Places, tuple[int, int]], None]
_Turn = Callable[[Row, int, int, _Floats, int], None]

turn = cast(_Turn, intrinsic(_turn))
"""Write a line of each of a panel's outputs by input, in float32: (weights, place, how far apart
outputs are, target, place). Inputs are `OUTPUTS` apart there."""
add_products = cast(_AddProducts, intrinsic(_add_products))
"""Sums = those begun + inputs times weights as `turn` writes them, of some rows and outputs:
(inputs, weights, how many inputs, sums begun, sums, (rows, outputs))."""


REGISTERS = 2
"""Registers of w that are multiplied together, of `LANES` numbers each."""
QUERIES = 3
"""Most rows of x that are multiplied together."""


_Queries: TypeAlias = tuple[Row, int, int]
_Weights: TypeAlias = tuple[Row, int, int, int, int, int, int]
_Sums: TypeAlias = tuple[Row, int, int, int, int]
_Multiply: TypeAlias = Callable[[int, _Queries, _Weights, _Sums, int, Lanes], None]


def multiply_rows(streams: int, scaled: bool) -> _Multiply:
    """Make an operation that multiplies one to `QUERIES` rows of x with two registers of w.

    Sums stay in registers while the inputs go by, `streams` of them at a time, each with separate
    sums; a sum is one chain of fused products. There is code for each number of rows. The operation
    takes

    - how many rows there are;
    - x, where its first number is, and how far apart rows are;
    - w, where the first input's first register is, how far apart inputs and registers are, how far
      ahead w is fetched on the way: that of a token that comes soon, whose place no processor would
      guess; the number of the first input, and how much further inputs are apart from one multiple
      of `LANES` to the next;
    - sums, where the first one is, and how far apart they are by stream, by row and by register;
    - how many inputs there are;
    - a factor on sums that begin at zero, if `scaled`; else products are added to the sums.
    """

    def typed(
        _: Any, rows: Any, x: Any, w: Any, sums: Any, count: Any, scale: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            for number in range(1, QUERIES + 1):
                with builder.if_then(builder.icmp_signed("==", values[0], index_of(number))):
                    emit_rows(context, builder, signature.args, values, number)
            return context.get_dummy_value()

        return types.void(rows, x, w, sums, count, scale), emit

    def emit_rows(
        context: Any, builder: Any, kinds: Sequence[Any], values: Sequence[Any], number: int
    ) -> None:
        x_kind, w_kind, sums_kind = (kind[0] for kind in kinds[1:4])
        unpacked = (cgutils.unpack_tuple(builder, each) for each in values[1:4])
        (x, x_at, x_row), (w, w_at, w_input, w_register, ahead, number_at, apart), of_sums = (
            unpacked
        )
        (sums, at, stream, row, register), (count, scale) = of_sums, values[4:]
        size = number * REGISTERS
        turns = builder.sdiv(count, index_of(streams))
        whole = builder.mul(turns, index_of(streams))

        def place(first: Any, *steps: tuple[Any, int]) -> Any:
            for stride, number in steps:
                first = builder.add(first, builder.mul(stride, index_of(number)))
            return first

        def with_input(k: Any, before: Sequence[Any], fetched: int) -> list[Any]:
            many = builder.sdiv(builder.add(number_at, k), index_of(LANES))
            first = builder.add(
                w_at, builder.add(builder.mul(k, w_input), builder.mul(many, apart))
            )
            starts = [place(first, (w_register, c)) for c in range(REGISTERS)]
            weights = [loaded(context, builder, w_kind, w, start) for start in starts]
            for start in starts[:fetched]:
                fetch(context, builder, w_kind, w, builder.add(start, ahead))
            of_rows = [place(builder.add(x_at, k), (x_row, q)) for q in range(number)]
            numbers = [loaded(context, builder, x_kind, x, each, SCALARS) for each in of_rows]
            shares = [in_all(builder, each, FLOATS) for each in numbers]
            return _with_products(builder, shares, weights, before)

        def turn(step: Any, before: Sequence[Any]) -> list[Any]:
            after: list[Any] = []
            for s in range(streams):
                k = place(index_of(s), (step, streams))
                fetched = REGISTERS if streams == 1 else 1
                after += with_input(k, before[s * size : s * size + size], fetched)
            return after

        def last(step: Any, before: Sequence[Any]) -> list[Any]:
            return with_input(builder.add(whole, step), before, 0)

        indices = [
            place(at, (stream, s), (row, q), (register, c))
            for s in range(streams)
            for q in range(number)
            for c in range(REGISTERS)
        ]
        ends = [pointer_to(context, builder, sums_kind, sums, index, FLOATS) for index in indices]
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        begun = [zero if scaled else builder.load(end, align=4) for end in ends]
        totals = in_registers(builder, begun, turns, turn)
        if streams > 1:
            left = builder.sub(count, whole)
            totals = in_registers(builder, totals[:size], left, last) + totals[size:]
        for total, end in zip(totals, ends, strict=True):
            total = builder.fmul(total, scale) if scaled else total
            builder.store(total, end, align=4)

    return cast(_Multiply, intrinsic(typed))
