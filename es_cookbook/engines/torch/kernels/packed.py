"""Products in bfloat16, with weights that oneDNN holds in its own layout.

Where a processor has instructions for it (`processor`), a packed product is 1.0 times as fast as a
plain one for many rows and 1.6 times for few. A row's bits depend neither on the number of rows nor
on its place among them, which is tried where products are chosen.

For each number of rows oneDNN compiles a program, which takes a fifth of a millisecond and half a
megabyte or more. It and torch keep 1,024 of them each, which grew to gigabytes over a run; they are
told to keep fewer.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

_PROGRAMS_KEPT = "64"
"""A lane has one for each shape of weight while its batch is the same."""
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, _PROGRAMS_KEPT)  # read at the first product


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


@contextmanager
def one_thread() -> Generator[None]:
    """Inside, torch runs as a lane does; on a busy machine threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
