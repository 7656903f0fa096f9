"""Random words, exactly the stream of `numpy.random.Philox` (Philox4x64-10), and normal numbers.

Block b of the stream is the first block of `numpy.random.Philox(key=key, counter=b)`. NumPy
increments its counter before it generates, so in terms of the published function (Random123), block
b is Philox4x64-10 at counter (b + 1, 0, 0, 0). Another implementation of the same words (the
Triton kernels) must use b + 1 too.

The generator is reused: setting its state takes under a microsecond, constructing one ten times as
long, and a generation needs thousands of small tensors. Each thread has its own, because engines
generate noise in threads.

Sixteen random bits make a standard-normal number by a table Q: Q[k] is the normal quantile at
(k + 1/2) / 65536, scaled so that the table has variance exactly 1 up to rounding, as float32. It is
antisymmetric, Q[k] = -Q[65535 - k], so its mean is 0. It is computed when first needed (tens of
milliseconds) rather than shipped. Its bits do not depend on the machine: the quantiles are float64
from one published rational approximation (Wichura's AS241, in the standard library), whose only
calls into libm are a logarithm and a square root, and the closest that any of them comes to a
float32 rounding boundary is thousands of float64 units, where libms differ by one or two. The
checksum is verified on every load.
"""

import functools
import hashlib
import sys
import threading
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

WORDS_PER_BLOCK = 4
"""64-bit words in one block."""


@functools.cache
def name_key(name: str) -> int:
    """Second half of the key: 64-bit BLAKE2b of the parameter's name, little end first."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def words(seed: int, name: str, first_block: int, num_blocks: int) -> NDArray[np.uint64]:
    """Blocks `first_block` ... of the stream with key (seed, `name_key(name)`), four words each.

    Words are little-endian in memory on every machine.
    """
    state = _this_thread.state
    key = state["state"]["key"]
    key[0], key[1] = seed, name_key(name)
    state["state"]["counter"][0] = first_block
    _this_thread.philox.state = state
    drawn = _this_thread.philox.random_raw(WORDS_PER_BLOCK * num_blocks)
    return drawn if sys.byteorder == "little" else drawn.astype("<u8")


class _ThisThread(threading.local):
    """A bit generator per thread, and a state to write into it: at counter 0, nothing buffered."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.state = self.philox.state


_this_thread = _ThisThread()


SIZE = 2**16
SCALE = 1.0000101408279616
"""1 / standard deviation of the unscaled quantiles."""
CHECKSUM = "65561716612ffbcbfd947ed80353b542"
"""BLAKE2b-128 of the table's little-endian bytes."""


def normal_quantiles() -> NDArray[np.float64]:
    """The upper half of the table before it is rounded to float32, ascending from the median."""
    inverse = NormalDist().inv_cdf
    half = np.array([inverse((k + 0.5) / SIZE) for k in range(SIZE // 2, SIZE)])
    return half * SCALE


@functools.cache
def normal_table() -> NDArray[np.float32]:
    """Q, read-only.

    Raises:
        RuntimeError: This machine computes another table than the one all noise is defined by.
    """
    half = normal_quantiles().astype(np.float32)
    both = np.concatenate([-half[::-1], half])
    found = checksum(both)
    if found != CHECKSUM:
        raise RuntimeError(
            f"the table of normal quantiles must have checksum {CHECKSUM}, found {found}: this "
            "machine's float64 arithmetic differs, and so would its noise from other machines'"
        )
    both.setflags(write=False)
    return both


def checksum(values: NDArray[np.float32]) -> str:
    """BLAKE2b-128 of the values' little-endian bytes."""
    return hashlib.blake2b(values.astype("<f4").tobytes(), digest_size=16).hexdigest()
