"""Products with weights that oneDNN holds in a layout of its own, where that is faster.

BLAS arranges a weight anew for every product, and MKL takes its older kernels on processors that
are not Intel's: on an AMD EPYC with AVX-512 a packed product takes less than half the time, on one
with AVX2 alone as long as a plain one. So it is measured, once a process. A row's bits depend
neither on the number of rows nor on its place among them, which is tried as well.

For each number of rows oneDNN compiles a program, which takes a fifth of a millisecond and half a
megabyte or more. It and torch keep 1,024 of them each, which grew to gigabytes over a run; they are
told to keep fewer.
"""

import functools
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

_PAYS = {torch.float32: 1.3, torch.bfloat16: 0.8}
"""How many times as fast a packed product has to be, so that noise does not decide.

Bfloat16 is oneDNN's with and without: measured 1.0 times as fast for many rows, 1.6 for few.
"""
_PROGRAMS_KEPT = "64"
"""A lane has one for each shape of weight while its batch is the same."""
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, _PROGRAMS_KEPT)  # read at the first product
_ROWS, _IN, _OUT = 512, 256, 1024
_REPEATS = 7


class PackedWeight:
    """A linear layer's weight (out, in) as it is now, and its bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self._bias = None if bias is None else bias.detach()

    def replace(self, weight: torch.Tensor) -> None:
        """Take the memory of the weight that this was made of: its values are here as well."""
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
        """X Wᵀ + bias: (rows, in) -> (rows, out)."""
        return torch.ops.mkldnn._linear_pointwise(x_T_N, self._weight, self._bias, "none", [], "")


@functools.cache
def packing_pays(dtype: torch.dtype) -> bool:
    """Whether packed products of this dtype are much faster on this processor, and as exact."""
    if dtype not in _PAYS or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, _IN, generator=generator).to(dtype) for n in (_ROWS, _OUT))
    with torch.inference_mode(), one_thread():
        try:
            packed = PackedWeight(weight, None)
            whole = packed(x)
            parts = [packed(x[first:]) for first in (1, _ROWS // 2, _ROWS - 1)]
        except (RuntimeError, AttributeError):  # oneDNN has no product of this dtype here
            return False
        if any(not torch.equal(part, whole[-len(part) :]) for part in parts):
            return False
        plain = _seconds(lambda: F.linear(x, weight))
        return plain > _PAYS[dtype] * _seconds(lambda: packed(x))


def _seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs."""
    shortest = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


@contextmanager
def one_thread() -> Generator[None]:
    """Inside, torch runs as a lane does; on a busy machine threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
