"""Products of linear layers on the CPU, with weights as they lie in the model or packed by oneDNN.

**In float32**, with weights of any dtype. Most processors multiply float32 alone, while most
checkpoints are in 16 bits, and a copy of a model in float32 would take twice its memory again. Here
a few outputs' weights at a time are widened into a buffer that stays in the nearest cache, and
multiplied with all rows of the batch from there, so nothing is kept and weights are written in
place. From 64 rows on this takes as long as oneDNN's packed product in float32; for one row it
takes little more than reading the weights (`python -m benchmarks.processors`). A row's bits depend
on its own numbers and on the weights: not on the batch, not on the processor.

**In bfloat16**, on processors with instructions for it, which take half the time; others take
several times as long as for float32. Weights are held in oneDNN's own layout: 1.0 times as fast as
the plain one for many rows and 1.6 times for few. No CPU multiplies float16 faster than float32
without rounding sums.

Weights keep their dtype either way, and so do the centre, the history and its fingerprints.
"""

import functools
import os
import platform
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from es_cookbook.engines.torch.kernels.lanes import Row, kernel, prefetch
from es_cookbook.engines.torch.kernels.panels import DEPTH, LINE, OUTPUTS, PANEL, add_products, turn
from es_cookbook.evolution.noise.compiled import features

_Floats = NDArray[np.float32]


@kernel()
def _width(left: int, outputs: int) -> int:
    """Return the number of outputs that come next; the last tile repeats some of those before."""
    for width in range(OUTPUTS, PANEL, -PANEL):
        if left > width - PANEL and outputs >= width:
            return width
    return PANEL


@kernel()
def _turn_panels(
    w: Row, at: int, ahead: int, shape: tuple[int, int], size: int, weights: _Floats
) -> None:
    """Write a tile of weights, of a shape and from a place on, in the layout of `panels`."""
    width, depth = shape
    line = LINE // w.itemsize
    for n in range(0, width, PANEL):
        for each in range(0, depth, line):
            k = min(each, depth - line)  # the last ones with some of those before them
            offset = n * size + k
            turn(w, at + offset, size, weights, k * OUTPUTS + n)
            for i in range(PANEL):
                prefetch(w, ahead + offset + i * size)


@kernel(
    [
        f"void(float32[:,::1], {weights}[:,::1], float32[::1], float32[:,::1], float32[::1])"
        for weights in ("float32", "uint16", "int16")
    ]
)
def _multiply(
    x_T_K: _Floats, w_N_K: Row, bias_N: _Floats, y_T_N: _Floats, weights: _Floats
) -> None:
    """Write y = x Wᵀ + bias, of at least a panel and a line; `weights` is a buffer."""
    rows, size = x_T_K.shape
    outputs, line = len(w_N_K), LINE // w_N_K.itemsize
    x, w, y = x_T_K.reshape(-1), w_N_K.reshape(-1), y_T_N.reshape(-1)
    end = 0
    while end < outputs:
        width = _width(outputs - end, outputs)
        first = min(end, outputs - width)
        end, k = first + width, 0
        while k < size:
            depth = DEPTH if size - k >= DEPTH + line else size - k
            at = first * size + k
            # What the next tiles read comes from memory while these compute.
            ahead = at + depth if k + depth < size else end * size
            _turn_panels(w, at, ahead, (width, depth), size, weights)
            sums = y, first, outputs
            begun = sums if k else (bias_N, first, 0)
            add_products((x, k, size), weights, depth, begun, sums, (rows, width))
            k += depth


class _Buffer(threading.local):
    """A thread's buffer of widened weights, which begins where a line does."""

    def __init__(self) -> None:
        size = 4 * (DEPTH + LINE) * OUTPUTS
        bytes_ = np.empty(size + LINE, np.uint8)
        begin = -bytes_.ctypes.data % LINE
        self.weights = bytes_[begin : begin + size].view(np.float32)


_buffer = _Buffer()
_STORED_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Stand-in dtypes of 16-bit numbers in kernels: see `lanes`."""
_zeros = functools.cache(functools.partial(np.zeros, dtype=np.float32))


def as_stored(weight: torch.Tensor) -> NDArray[Any]:
    """Return a weight's own memory, as kernels read it."""
    return weight.detach().view(_STORED_AS.get(weight.dtype, weight.dtype)).numpy()


def bias_of(bias_N: torch.Tensor | None, outputs: int) -> _Floats:
    """Return a bias in float32; zeros if there is none."""
    return _zeros(outputs) if bias_N is None else bias_N.detach().float().numpy()


def multiply(
    x_T_K: torch.Tensor,
    weight_N_K: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    live: int | None = None,
) -> torch.Tensor:
    """Return x Wᵀ + bias, in float32, on this thread: (rows, in), (out, in) -> (rows, out).

    Args:
        x_T_K: contiguous, in float32.
        weight_N_K: contiguous, in float32, bfloat16 or float16.
        bias_N: in any of these.
        live: rows from here on belong to no request, and may be 0.
    """
    outputs, inputs = weight_N_K.shape
    if outputs < PANEL or inputs < LINE // weight_N_K.itemsize:
        return _of_few(x_T_K, weight_N_K, bias_N)
    x = x_T_K.detach().numpy()
    product = torch.empty(len(x), outputs)
    y, live = product.numpy(), len(x) if live is None else live
    y[live:] = 0
    _multiply(x[:live], as_stored(weight_N_K), bias_of(bias_N, outputs), y[:live], _buffer.weights)
    return product


def _of_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with zero padding: fewer outputs or inputs than are transposed together."""
    outputs, inputs = weight.shape
    more = max(0, LINE // weight.itemsize - inputs)
    below = max(0, PANEL - outputs)
    bias = None if bias is None else F.pad(bias, (0, below))
    weight = F.pad(weight, (0, more, 0, below))
    return multiply(F.pad(x, (0, more)), weight, bias)[:, :outputs].contiguous()


# For each number of rows oneDNN compiles a program, which takes a fifth of a millisecond and half a
# megabyte or more. It and torch keep 1,024 of them each, which grow to gigabytes over a run. A lane
# needs one for each shape of weight while its batch is the same. Read at the first product.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")


class PackedWeight:
    """A linear layer's weight (out, in) in bfloat16 as it is now, packed, and its bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()

    def replace(self, weight: torch.Tensor) -> None:
        """Free the memory of the weight that this was made of: the copy holds its values."""
        storage = weight.untyped_storage()
        if storage.resizable() and storage.nbytes() == weight.nbytes:
            storage.resize_(0)

    def give_back(self, weight: torch.Tensor) -> None:
        """Undo `replace`."""
        storage = weight.untyped_storage()
        if not storage.nbytes():
            storage.resize_(weight.nbytes)
            with torch.inference_mode():
                weight.copy_(self._weight.to_dense())

    def __call__(self, x_T_N: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + bias: (rows, in) -> (rows, out)."""
        return torch.ops.mkldnn._linear_pointwise(x_T_N, self._weight, self._bias, "none", [], "")


@contextmanager
def one_thread() -> Generator[None]:
    """Run torch on one thread inside, as lanes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16 that oneDNN may use."""
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not any(word in allowed for word in ("ALL", "BF16", "FP16", "AMX", "AVX10")):
        return False
    if platform.machine() == "aarch64" and torch.backends.mkldnn.is_available():
        # LLVM does not report ARM's `bf16`. torch calls oneDNN where it finds it.
        return torch.cpu.get_capabilities().get("bf16", False)
    return not {"+avx512bf16", "+amx-bf16"}.isdisjoint(features().split(","))


def multiplies_int8() -> bool:
    """Return whether the processor has instructions for products in int8 (`kernels.int8`)."""
    return not {"+avx512vnni", "+avxvnni"}.isdisjoint(features().split(","))


def products_of(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of products that is fastest on a device for weights of a dtype."""
    if device.type == "cuda" and weights == torch.bfloat16:
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if device.type != "cpu":
        return weights
    return weights if weights == torch.bfloat16 and multiplies_bfloat16() else torch.float32


_ROWS, _IN, _OUT = 128, 576, 1024


@functools.cache
def packs() -> bool:
    """Return whether a row of a packed product has the same bits in any batch, at any place."""
    if not multiplies_bfloat16():
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, _IN, generator=generator).bfloat16() for n in (_ROWS, _OUT))
    with torch.inference_mode(), one_thread():
        try:
            packed = PackedWeight(weight, None)
            whole = packed(rows)
        except (RuntimeError, AttributeError):  # oneDNN has no such product here
            return False
        parts = [packed(rows[first:].contiguous()) for first in (1, _ROWS // 2, _ROWS - 16)]
    return all(torch.equal(part, whole[-len(part) :]) for part in parts)
