"""Exact arithmetic on weights, twice: in NumPy on the CPU, and in torch where the weights are.

Both return the same bits. NumPy and torch's eager operations compute one operation at a time and
store its result as float32, so every difference, product and sum is rounded separately; a kernel
that fused two of them (`torch.compile`, `addcmul_`) could round once for both. Integers wrap at 64
bits in both, so a sum is the same in any order.
"""

import hashlib

import numpy as np
import torch

from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.spaces.base import PIECE, as_array

MODULUS = 2**64
"""Of fingerprints."""
DEVICE_PIECE = 2**24
"""Elements that torch works on at once: temporaries of up to 128 MiB each."""


def decay_(weight: torch.Tensor, base: torch.Tensor, decay: float) -> None:
    """W <- base + keep * (W - base), keep = float32(1 - decay), on the CPU; W <- base for 1.

    The weight is contiguous float32; the base has as many elements, of any dtype.
    """
    keep = np.float32(1 - decay)
    moving = as_array(weight.view(-1))
    anchor = base.reshape(-1)
    if decay == 1:  # The sum would turn a base's -0 into 0, and an infinite weight into NaN.
        weight.view(-1).copy_(anchor)
        return
    for i in range(0, moving.size, PIECE):
        piece = moving[i : i + PIECE]
        anchor_piece = anchor[i : i + PIECE].to(torch.float32).numpy()
        np.subtract(piece, anchor_piece, out=piece)
        np.multiply(piece, keep, out=piece)
        np.add(anchor_piece, piece, out=piece)


def device_decay_(weight: torch.Tensor, base: torch.Tensor, decay: float) -> None:
    """`decay_` on any device; the base may be on the CPU, and is copied piece by piece."""
    keep = float(np.float32(1 - decay))
    moving, anchor = weight.view(-1), base.reshape(-1)
    if decay == 1:
        moving.copy_(anchor)
        return
    for i in range(0, moving.numel(), DEVICE_PIECE):
        anchor_piece = anchor[i : i + DEVICE_PIECE].to(weight.device, torch.float32)
        moving[i : i + DEVICE_PIECE].sub_(anchor_piece).mul_(keep).add_(anchor_piece)


def fingerprint(name: str, weight: torch.Tensor, part: Part) -> int:
    """The contribution of a part of a tensor to the centre's fingerprint, on the CPU."""
    flat = weight.view(-1)
    total, done = 0, 0
    for span in part.spans():
        total += fingerprint_span(name, flat[done : done + len(span)], span.start)
        done += len(span)
    return total % MODULUS


def fingerprint_span(name: str, flat: torch.Tensor, start: int) -> int:
    """The contribution of a tensor's elements `start`, `start + 1`, ...: 0 ... 2⁶⁴ - 1.

    `flat` is contiguous float32 on the CPU, one axis. Ranges add up modulo 2⁶⁴.
    """
    a, b = _multipliers(name)
    patterns = as_array(flat).view(np.uint32)
    position = np.arange(min(PIECE, patterns.size), dtype=np.uint64)
    total = 0
    for i in range(0, patterns.size, PIECE):
        bits = patterns[i : i + PIECE].astype(np.uint64)
        # Σ bits_j · (a + (start + i + j) · b) over the elements j of the piece; uint64 sums wrap.
        plain = int(bits.sum())
        by_position = int(bits @ position[: bits.size])
        total += (a + (start + i) * b) * plain + b * by_position
    return total % MODULUS


def device_fingerprint(name: str, weight: torch.Tensor, part: Part) -> int:
    """`fingerprint` on any device; synchronises."""
    a, b = _multipliers(name)
    rows = weight.view(part.shape)
    column = torch.arange(part.shape[1], device=weight.device)
    at_once = max(1, DEVICE_PIECE // max(1, part.shape[1]))
    total = 0
    for i in range(0, len(rows), at_once):
        # int64 in place of uint64: they wrap to the same bits.
        bits = rows[i : i + at_once].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        of_row = bits.sum(1)
        by_row = (of_row * torch.arange(len(bits), device=weight.device)).sum()
        by_column = bits.mul_(column).sum()
        sums = torch.stack((of_row.sum(), by_row, by_column)).tolist()
        first = (part.rows[0] + i) * part.width + part.columns[0]
        # Row r of the piece begins at element first + r · width.
        total += (a + first * b) * sums[0] + b * (part.width * sums[1] + sums[2])
    return total % MODULUS


def _multipliers(name: str) -> tuple[int, int]:
    """A and b of a tensor: element i's bits count a + i · b times."""
    digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"fingerprint").digest()
    return int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:], "little") & ~3 | 2
