"""Products in float32 with weights of any dtype, as they lie in the model.

Most processors multiply float32 alone, while most checkpoints are in 16 bits. A copy of a model in
float32 would take twice its memory again. Here a few outputs' weights at a time are widened into a
buffer that stays in the nearest cache, and multiplied with all rows of the batch from there: the
widening is a few percent of the work, and nothing is kept. Weights need no packing either, so they
are written in place. On AVX-512 and AVX2 this takes as long as oneDNN's packed product in float32
(`python -m benchmarks.processors`).

A row's bits depend on its own numbers and on the weights: not on the batch, not on the processor.
"""

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import (
    LANES,
    ZERO,
    Row,
    kernel,
    load,
    prefetch,
    spread,
    store,
)
from es_cookbook.engines.torch.kernels.rows import widen_row
from es_cookbook.engines.torch.kernels.tiles import (
    DEPTH,
    OUTPUTS,
    PANELS,
    STRIDE,
    add_tile,
    add_tiles,
    turn_rows,
    turn_sums,
)

_Floats = NDArray[np.float32]

_TOGETHER = 8 * OUTPUTS
"""Outputs that are written together: fewer lie in pieces that are far apart."""
_LINE = 64
"""Bytes that come from memory together, on every processor that is known of."""


@kernel()
def _by_input(x_T_K: _Floats, panels: int, out: _Floats) -> None:
    """Panels of sixteen rows with an input's sixteen numbers side by side; 0 beyond the last."""
    rows, size = x_T_K.shape
    x, whole = x_T_K.reshape(-1), size // LANES * LANES
    for panel in range(panels):
        first, to = panel * LANES, panel * size * LANES
        is_whole = first + LANES <= rows
        if is_whole:
            for k in range(0, whole, LANES):
                turn_rows(x, first * size + k, size, out, to + k * LANES, LANES)
        for k in range(whole if is_whole else 0, size):
            for row in range(LANES):
                inside = first + row < rows
                out[to + k * LANES + row] = x[(first + row) * size + k] if inside else ZERO


@kernel()
def _sums_of(
    w: Row,
    first: int,
    shape: tuple[int, int, int],
    rows: _Floats,
    buffers: tuple[_Floats, _Floats],
) -> None:
    """Add all products of a tile's outputs, from `first` on, to the sums of each panel of rows.

    `shape` is outputs, inputs and panels; both buffers, of weights and sums, are written.
    """
    outputs, size, panels = shape
    weights, sums = buffers
    count = min(OUTPUTS, outputs - first)
    for begin in range(0, size, DEPTH):
        depth = min(DEPTH, size - begin)
        for m in range(count):
            at = (first + m) * size + begin
            widen_row(w, at, depth, weights, m * STRIDE)
            if first + OUTPUTS + m < outputs:
                # What the next tile reads comes from memory while this one computes.
                for k in range(0, depth, _LINE // w.itemsize):
                    prefetch(w, at + OUTPUTS * size + k)
        panel, place = 0, size * LANES
        while panel + PANELS <= panels:
            of_rows, of_sums = panel * place + begin * LANES, panel * LANES * LANES
            add_tiles(weights, rows, of_rows, place, depth, sums, of_sums)
            panel += PANELS
        while panel < panels:
            of_rows, of_sums = panel * place + begin * LANES, panel * LANES * LANES
            add_tile(weights, rows, of_rows, place, depth, sums, of_sums)
            panel += 1


@kernel(
    [
        f"void(float32[:,::1], {weights}[:,::1], float32[::1], float32[:,::1], float32[::1])"
        for weights in ("float32", "uint16", "int16")
    ]
)
def _multiply(x_T_K: _Floats, w_N_K: Row, bias_N: _Floats, y_T_N: _Floats, rows: _Floats) -> None:
    """Y = x Wᵀ + bias; `rows` is written: its length is that of whole panels of x."""
    num_rows, outputs, size = len(x_T_K), len(w_N_K), x_T_K.shape[1]
    panels = (num_rows + LANES - 1) // LANES
    _by_input(x_T_K, panels, rows)
    buffers = np.zeros(OUTPUTS * STRIDE, np.float32), np.empty(panels * LANES * LANES, np.float32)
    sums = buffers[1]
    some = np.empty(panels * LANES * _TOGETHER, np.float32)
    w, y = w_N_K.reshape(-1), y_T_N.reshape(-1)
    for begin in range(0, outputs, _TOGETHER):
        end = min(begin + _TOGETHER, outputs)
        for first in range(begin, end, OUTPUTS):
            for m in range(OUTPUTS):
                of_m = bias_N[first + m] if first + m < len(bias_N) else ZERO
                for panel in range(panels):
                    store(sums, (panel * LANES + m) * LANES, spread(of_m))
            _sums_of(w, first, (outputs, size, panels), rows, buffers)
            for panel in range(panels):
                to = panel * LANES * _TOGETHER + first - begin
                turn_sums(sums, panel * LANES * LANES, LANES, some, to, _TOGETHER)
        count = end - begin
        whole = count // LANES * LANES
        for t in range(num_rows):
            at, to = t * _TOGETHER, t * outputs + begin
            for n in range(0, whole, LANES):
                store(y, to + n, load(some, at + n))
            for n in range(whole, count):
                y[to + n] = some[at + n]


class _Room(threading.local):
    """Memory for a thread's rows, of which a large one would be asked of the system every time."""

    floats = np.empty(0, np.float32)

    def of(self, size: int) -> _Floats:
        if len(self.floats) < size:
            self.floats = np.empty(size, np.float32)
        return self.floats


_room = _Room()
_NONE = np.empty(0, np.float32)
_STORED_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""What kernels know 16-bit numbers as: see `lanes`."""


def multiply(
    x_T_K: torch.Tensor, weight_N_K: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """X Wᵀ + bias, in float32, on this thread: (rows, in), (out, in) -> (rows, out).

    Args:
        x_T_K: contiguous, in float32.
        weight_N_K: contiguous, in float32, bfloat16 or float16.
        bias_N: of any of these.
    """
    x, weight = x_T_K.detach(), weight_N_K.detach()
    weight = weight.view(_STORED_AS.get(weight.dtype, weight.dtype))
    bias = _NONE if bias_N is None else bias_N.detach().float().numpy()
    y = torch.empty(len(x), len(weight))
    rows = _room.of(-(-len(x) // LANES) * LANES * x.shape[1])
    _multiply(x.numpy(), weight.numpy(), bias, y.numpy(), rows)
    return y
