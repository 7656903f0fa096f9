"""Operations of which a matrix product is made: a tile of it, and turning sixteen rows over.

A tile is a few outputs of some tens of rows, whose sums stay in registers while the inputs go by.
Each sum is one chain of fused products, in the order of the inputs, so it has the same bits
whatever the tile's size, on every processor. LLVM is given the whole loop: left to find it, it
would keep the sums in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from es_cookbook.common.compiled import features
from es_cookbook.engines.torch.kernels.lanes import (
    FLOATS,
    INTS,
    LANES,
    in_all,
    pointer_to,
)

_INDEX = ir.IntType(64)
_Floats = NDArray[np.float32]


OUTPUTS, PANELS = (12, 2) if "+avx512f" in features() else (6, 1)
"""Outputs of a tile, and how many times sixteen rows it has: as many sums as fill the registers.

Of 32 registers of 16 numbers, 24 hold sums; of AVX2's 16 of 8, 12; of NEON's 32 of 4, 24.
"""
DEPTH = 384
"""Inputs that a tile goes through at a time: as many of its weights fit into the nearest cache."""
STRIDE = DEPTH + LANES
"""From one output's weights to the next one's: a multiple of 4 KiB would put all of them into the
same few places of the cache."""


def _at(builder: Any, place: Any, offset: Any) -> Any:
    offset = ir.Constant(_INDEX, offset) if isinstance(offset, int) else offset
    return builder.gep(place, [offset])


def _lanes_at(builder: Any, place: Any, offset: Any) -> Any:
    return builder.bitcast(_at(builder, place, offset), FLOATS.as_pointer())


def _tile(panels: int) -> Any:
    """An operation that adds the products of so many panels of rows to a tile's sums."""
    shape = [(m, n) for m in range(OUTPUTS) for n in range(panels)]

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        weights, rows, of_rows, panel, depth, sums, of_sums = values
        kinds, float_ = signature.args, ir.FloatType()
        w = pointer_to(context, builder, kinds[0], weights, ir.Constant(_INDEX, 0), float_)
        x = pointer_to(context, builder, kinds[1], rows, of_rows, float_)
        y = pointer_to(context, builder, kinds[5], sums, of_sums, float_)
        places = [_lanes_at(builder, y, (n * LANES + m) * LANES) for m, n in shape]
        begun = [builder.load(place, align=4) for place in places]
        before, loop = builder.block, builder.append_basic_block("inputs")
        end = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INDEX)
        k.add_incoming(ir.Constant(_INDEX, 0), before)
        running = [builder.phi(FLOATS) for _ in shape]
        for phi, start in zip(running, begun, strict=True):
            phi.add_incoming(start, before)
        added = _with_products(builder, running, _at(builder, w, k), x, k, panel, panels)
        following = builder.add(k, ir.Constant(_INDEX, 1))
        k.add_incoming(following, loop)
        for phi, total in zip(running, added, strict=True):
            phi.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
        builder.position_at_end(end)
        for place, total in zip(places, added, strict=True):
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    def tile(
        _: Any, weights: Any, rows: Any, of_rows: Any, panel: Any, depth: Any, sums: Any, to: Any
    ) -> tuple[Any, Callable[..., Any]]:
        del of_rows, panel, depth, to
        return types.void(weights, rows, *[types.intp] * 3, sums, types.intp), emit

    return intrinsic(tile)


def _with_products(
    builder: Any, running: Sequence[Any], w: Any, x: Any, k: Any, panel: Any, panels: int
) -> list[Any]:
    """The sums with the products of one input: an output's weight times a panel's sixteen rows."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    here = builder.mul(k, ir.Constant(_INDEX, LANES))
    offsets = [builder.add(here, builder.mul(panel, ir.Constant(_INDEX, n))) for n in range(panels)]
    x_of = [builder.load(_lanes_at(builder, x, offset), align=4) for offset in offsets]
    w_of = [builder.load(_at(builder, w, m * STRIDE)) for m in range(OUTPUTS)]
    spread = [in_all(builder, weight, FLOATS) for weight in w_of]
    pairs = [(weight, row) for weight in spread for row in x_of]
    return [builder.call(fma, [*pair, total]) for pair, total in zip(pairs, running, strict=True)]


def _turned(builder: Any, rows: Sequence[Any]) -> Sequence[Any]:
    """Sixteen rows of sixteen numbers as their columns: four times, both halves interleaved."""
    half = LANES // 2
    first, second = (
        ir.Constant(INTS, [n for i in range(at, at + half) for n in (i, LANES + i)])
        for at in (0, half)
    )
    for _ in range(4):
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [builder.shuffle_vector(*pair, to) for pair in pairs for to in (first, second)]
    return rows


def _turn(count: int) -> Any:
    """An operation that writes sixteen rows of an array as columns, the first `count` of each."""
    sizes = [size for size in (16, 8, 4, 2, 1) if count & size]

    def emit(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        source, at, stride, target, to, step = values
        kinds, float_ = signature.args, ir.FloatType()
        from_ = pointer_to(context, builder, kinds[0], source, at, float_)
        place = pointer_to(context, builder, kinds[3], target, to, float_)
        starts = [builder.mul(stride, ir.Constant(_INDEX, i)) for i in range(LANES)]
        rows = [builder.load(_lanes_at(builder, from_, start), align=4) for start in starts]
        for i, row in enumerate(_turned(builder, rows)):
            begin, done = _at(builder, place, builder.mul(step, ir.Constant(_INDEX, i))), 0
            for size in sizes:
                some = ir.VectorType(ir.IntType(32), size)
                piece = builder.shuffle_vector(
                    row, row, ir.Constant(some, list(range(done, done + size)))
                )
                there = builder.bitcast(
                    _at(builder, begin, done), ir.VectorType(float_, size).as_pointer()
                )
                builder.store(piece, there, align=4)
                done += size
        return context.get_dummy_value()

    def turn(
        _: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, step: Any
    ) -> tuple[Any, Callable[..., Any]]:
        del at, stride, to, step
        return types.void(source, *[types.intp] * 2, target, *[types.intp] * 2), emit

    return intrinsic(turn)


_Tile = Callable[[_Floats, _Floats, int, int, int, _Floats, int], None]
_Turn = Callable[[_Floats, int, int, _Floats, int, int], None]

add_tile = cast(_Tile, _tile(1))
"""Sums += weights times rows, for sixteen rows: (weights, rows, their place, inputs · 16, depth,
sums, their place). Weights of an output lie `STRIDE` apart, rows by input, sums by output."""
add_tiles = cast(_Tile, _tile(PANELS))
"""The same of `PANELS` times sixteen rows, whose panels and sums lie one behind the other."""
turn_rows = cast(_Turn, _turn(LANES))
"""Target's column i = source's row i: (source, place, stride, target, place, stride)."""
turn_sums = cast(_Turn, _turn(OUTPUTS))
"""The same, of as many of the rows as a tile has outputs."""
