"""Products of int8, scaled by block: weights and rows in 8 bits, for processors with VNNI.

An instruction of AVX512_VNNI or AVX-VNNI multiplies four times as many numbers of 8 bits as there
are of 32, and adds them in 32 bits. Weights are quantised when they are packed, rows in every
product: `BLOCK` inputs of an output, or of a row, have a scale of their own, so a number that is
far larger than the others takes precision from its block alone. Sums within a block are exact. They
are scaled and added in float32, block by block: a row's bits depend on its own numbers and on the
weights, not on the batch, and are the same with either instruction.

As in `panels`, outputs lie side by side in a register, and a row's inputs, four at a time, are in
all lanes of another. The instruction multiplies unsigned bytes by signed ones: weights have 128
added, and a block's sum begins with what that makes of the row.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    INTS,
    LANES,
    ZERO,
    Lanes,
    Number,
    Row,
    call_llvm,
    fma,
    in_all,
    index_of,
    kernel,
    load,
    pointer_to,
    spread,
)
from es_cookbook.engines.torch.kernels.panels import Places, Rows, each_tile, register_at, sum_up
from es_cookbook.engines.torch.kernels.products import as_stored, bias_of
from es_cookbook.engines.torch.kernels.rows import widen_row
from es_cookbook.evolution.noise.compiled import features

_BITS = 512 if "+avx512vnni" in features() else 256 if "+avxvnni" in features() else 0
"""Width in bits of the registers that the instruction works on; 0 without the instruction."""
IS_NATIVE = _BITS > 0
"""Whether this processor has the instruction; nothing here may be called without it."""
_WIDTH = (_BITS or 512) // 32
_ROWS, _REGISTERS = 4, 3
"""Most rows whose sums are in registers together, and registers of each row."""
OUTPUTS = 3 * LANES
"""Outputs of a tile; a weight has no fewer."""
BLOCK = 2 * LANES
"""Inputs that share a scale."""
_FOUR = 4
"""Inputs that lie side by side in 32 bits."""
_STEPS = BLOCK // _FOUR
_OF_ROW = 2 + _STEPS
"""Numbers of 32 bits in a row's block: its scale, what sums begin with, and its inputs."""
_OF_TILE = (1 + _STEPS) * OUTPUTS
"""The same of a tile's outputs: scales, then four inputs of each at a time."""
_DEPTH = 8
"""Blocks that tiles go through at a time: as many weights take half of the L1 cache."""

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, _WIDTH), ir.VectorType(_FLOAT, _WIDTH)
_Floats: TypeAlias = NDArray[np.float32]
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_Emit: TypeAlias = Callable[[Any, Any, Any, Sequence[Any]], Any]

_MOST, _LEAST = np.float32(127), np.float32(1e-30)
"""A block's greatest number, quantised; blocks of numbers below the other are 0."""
_SIGNS = np.int32(-0x7F7F7F80)
"""The highest bits of four bytes: 128 more of each."""
_ROUNDING = np.float32(1.5 * 2**23)
"""Added to a number, leaves the nearest integer in the lowest bits, ties to even."""


def _in_all(builder: Any, place: Any, offset: int) -> Any:
    """Emit a register with the 32 bits that are `offset` numbers after a place in all lanes."""
    number = builder.bitcast(builder.load(builder.gep(place, [index_of(offset)])), _INT)
    return in_all(builder, number, _INTS)


_AT_ONCE = _REGISTERS * _WIDTH
_OFFSETS = [range(first, first + _AT_ONCE, _WIDTH) for first in range(0, OUTPUTS, _AT_ONCE)]
"""Register offsets in a tile's outputs, grouped by sums that are in registers together."""


def _add_products(
    _: Any, x: Any, w: Any, at: Any, blocks: Any, begun: Any, y: Any, rows: Any
) -> tuple[Any, _Emit]:
    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        kinds, (_, weights, at, blocks, _, _, rows) = signature.args, values
        places = [Rows.unpacked(context, builder, kinds[n], values[n]) for n in (0, 4, 5)]
        of_weights = pointer_to(context, builder, kinds[1], weights, at, _FLOAT)

        def tile(some: Sequence[list[Any]]) -> None:
            for offsets in _OFFSETS:
                _tile(builder, some, of_weights, offsets, blocks)

        each_tile(builder, places, rows, _ROWS, tile)
        return context.get_dummy_value()

    del at, blocks, rows
    return types.void(x, w, *[types.intp] * 2, begun, y, types.intp), emit


def _tile(
    builder: Any, places: Sequence[list[Any]], w: Any, offsets: Sequence[int], blocks: Any
) -> None:
    """Emit some rows' sums of some outputs, kept in registers."""
    x_T, begun_T, y_T = places

    def more(block: Any, sums: Sequence[Any]) -> list[Any]:
        of_block = builder.gep(w, [builder.mul(block, index_of(_OF_TILE))])
        rows = [builder.gep(row, [builder.mul(block, index_of(_OF_ROW))]) for row in x_T]
        return _with_block(builder, sums, rows, of_block, offsets)

    sum_up(builder, (begun_T, y_T), (offsets, _FLOATS), blocks, more)


def _with_block(
    builder: Any, sums: Sequence[Any], x_T: Sequence[Any], w: Any, offsets: Sequence[int]
) -> list[Any]:
    """Emit the addition of a block's products, scaled, to sums."""
    products = _products(builder, x_T, w, offsets)
    of_rows = [builder.bitcast(_in_all(builder, row, 0), _FLOATS) for row in x_T]
    of_outputs = [builder.load(register_at(builder, w, n, _FLOATS), align=4) for n in offsets]
    scales = [builder.fmul(row, output) for row in of_rows for output in of_outputs]
    floats = [builder.sitofp(product, _FLOATS) for product in products]
    return [
        call_llvm(builder, f"llvm.fma.v{_WIDTH}f32", _FLOATS, *of_sum)
        for of_sum in zip(floats, scales, sums, strict=True)
    ]


def _products(builder: Any, x_T: Sequence[Any], w: Any, offsets: Sequence[int]) -> list[Any]:
    """Emit a block's products, in 32 bits."""
    dot = f"llvm.x86.avx512.vpdpbusd.{32 * _WIDTH}"
    totals = [start for row in x_T for start in [_in_all(builder, row, 1)] * len(offsets)]
    for step in range(_STEPS):
        here = [register_at(builder, w, (1 + step) * OUTPUTS + n, _FLOATS) for n in offsets]
        weights = [builder.bitcast(builder.load(place, align=4), _INTS) for place in here]
        fours = [_in_all(builder, row, 2 + step) for row in x_T]
        pairs = [(weight, four) for four in fours for weight in weights]
        totals = [
            call_llvm(builder, dot, _INTS, total, *pair)
            for total, pair in zip(totals, pairs, strict=True)
        ]
    return totals


def _most(_: Any, a: Any, b: Any) -> tuple[Any, _Emit]:
    """Return the greatest magnitude in two registers; infinite or NaN if any number is."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        del context, signature
        # Without their signs floats are ordered as their bits are.
        ints = [builder.bitcast(each, INTS) for each in values]
        a, b = (builder.and_(each, ir.Constant(INTS, [0x7FFFFFFF] * LANES)) for each in ints)
        both = builder.select(builder.icmp_signed(">", a, b), a, b)
        most = call_llvm(builder, f"llvm.vector.reduce.smax.v{LANES}i32", _INT, both)
        return builder.bitcast(most, _FLOAT)

    return types.float32(a, b), emit


def _put(_: Any, out: Any, at: Any, a: Any, b: Any) -> tuple[Any, _Emit]:
    """Write what sums begin with, and the lowest bytes of a block's numbers."""

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        out, at, *floats = values
        place = pointer_to(context, builder, signature.args[0], out, at, _INT)
        ints = [builder.bitcast(each, INTS) for each in floats]
        both = builder.add(*ints)
        total = call_llvm(builder, f"llvm.vector.reduce.add.v{LANES}i32", _INT, both)
        bits = ir.Constant(_INT, BLOCK * int(_ROUNDING.view(np.int32)) % (1 << 32))
        total = builder.sub(total, bits)
        builder.store(builder.mul(total, ir.Constant(_INT, -128)), place)
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        for i, each in enumerate(ints):
            there = builder.gep(place, [index_of(1 + i * LANES // _FOUR)])
            there = builder.bitcast(there, bytes_.as_pointer())
            builder.store(builder.trunc(each, bytes_), there, align=4)
        return context.get_dummy_value()

    return types.void(out, types.intp, a, b), emit


_AddProducts = Callable[[Places, _Floats, int, int, Places, Places, int], None]
_add_all = cast(_AddProducts, intrinsic(_add_products))
"""Sums = those begun + rows times a tile's outputs: (rows, weights, place, how many blocks, sums
begun, sums, how many rows)."""
_greatest = cast("Callable[[Lanes, Lanes], Number]", intrinsic(_most))
_write = cast("Callable[[_Floats, int, Lanes, Lanes], None]", intrinsic(_put))


@kernel()
def _quantise(x: Row, at: int, size: int, out: _Floats, to: int) -> None:
    """Write a row of `size` numbers as products read it, 0 beyond its last."""
    part = np.empty(BLOCK, np.float32)
    for begin in range(0, size, BLOCK):
        if begin + BLOCK <= size:
            a, b = load(x, at + begin), load(x, at + begin + LANES)
        else:
            part[:] = ZERO
            widen_row(x, at + begin, size - begin, part, 0)
            a, b = load(part, 0), load(part, LANES)
        most = _greatest(a, b)
        times, rounding = spread(_MOST / max(_LEAST, most)), spread(_ROUNDING)
        out[to] = most / _MOST
        _write(out, to + 1, fma(a, times, rounding), fma(b, times, rounding))
        to += _OF_ROW


@kernel()
def _first(tile: int, outputs: int) -> int:
    """Return a tile's first output; the last tile repeats some outputs of the one before."""
    return min(tile * OUTPUTS, outputs - OUTPUTS)


def _native(signature: str | list[str]) -> Callable[[_Kernel], _Kernel]:
    """Compile a kernel if this processor can run it."""
    return kernel(signature if IS_NATIVE else None)


@_native([f"void({w}[:,::1], float32[::1], int32[::1])" for w in ("float32", "uint16", "int16")])
def _pack(w_N_K: Row, scales: _Floats, fours: NDArray[np.int32]) -> None:
    """Write weights as products read them, to both outputs, which are the same memory."""
    outputs, size = w_N_K.shape
    w, blocks = w_N_K.reshape(-1), (size + BLOCK - 1) // BLOCK
    row = np.empty(blocks * _OF_ROW, np.float32)
    of_row, to = row.view(np.int32), 0
    for tile in range((outputs + OUTPUTS - 1) // OUTPUTS):
        for n in range(OUTPUTS):
            _quantise(w, (_first(tile, outputs) + n) * size, size, row, 0)
            for block in range(blocks):
                at = to + block * _OF_TILE + n
                scales[at] = row[block * _OF_ROW]
                for step in range(_STEPS):
                    four = of_row[block * _OF_ROW + 2 + step]
                    fours[at + (1 + step) * OUTPUTS] = four ^ _SIGNS
        to += blocks * _OF_TILE


@_native("void(float32[:,::1], float32[::1], float32[::1], float32[:,::1], float32[::1])")
def _multiply(x_T_K: _Floats, w: _Floats, bias_N: _Floats, y_T_N: _Floats, rows: _Floats) -> None:
    """Write y = x Wᵀ + bias; `rows` is a buffer for quantised rows."""
    (num_rows, size), outputs = x_T_K.shape, y_T_N.shape[1]
    x, y, blocks = x_T_K.reshape(-1), y_T_N.reshape(-1), (size + BLOCK - 1) // BLOCK
    stride = blocks * _OF_ROW
    for t in range(num_rows):
        _quantise(x, t * size, size, rows, t * stride)
    for tile in range((outputs + OUTPUTS - 1) // OUTPUTS):
        first = _first(tile, outputs)
        sums = y, first, outputs
        for block in range(0, blocks, _DEPTH):
            at, depth = (tile * blocks + block) * _OF_TILE, min(_DEPTH, blocks - block)
            begun = sums if block else (bias_N, first, 0)
            _add_all((rows, block * _OF_ROW, stride), w, at, depth, begun, sums, num_rows)


class _Room(threading.local):
    """Memory of a thread's rows, kept: the system would be asked for a large one every time."""

    floats = np.empty(0, np.float32)

    def at_least(self, size: int) -> _Floats:
        if len(self.floats) < size:
            self.floats = np.empty(size, np.float32)
        return self.floats


_room = _Room()


class Int8Weight:
    """A linear layer's weight (out, in) as it is now, quantised, and its bias.

    The weight has at least `OUTPUTS` outputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._outputs, inputs = weight.shape
        self._blocks = -(-inputs // BLOCK)
        tiles = -(-self._outputs // OUTPUTS)
        self._weight = np.empty(tiles * self._blocks * _OF_TILE, np.float32)
        self._bias = bias_of(bias, self._outputs)
        _pack(as_stored(weight.contiguous()), self._weight, self._weight.view(np.int32))

    def __call__(self, x_T_K: torch.Tensor, live: int | None = None) -> torch.Tensor:
        """Return x Wᵀ + bias in float32, on this thread: (rows, in) -> (rows, out)."""
        x, product = x_T_K.detach().numpy(), torch.empty(len(x_T_K), self._outputs)
        y, live = product.numpy(), len(x) if live is None else live
        y[live:] = 0
        rows = _room.at_least(live * self._blocks * _OF_ROW)
        _multiply(x[:live], self._weight, self._bias, y[:live], rows)
        return product
