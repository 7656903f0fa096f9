"""The random words of all noise: Philox4x64-10, exactly the stream of `numpy.random.Philox`.

Block b of the stream is the first block of `numpy.random.Philox(key=key, counter=b)`. NumPy
increments its counter before it generates, so in terms of the published function (Random123), block
b is Philox4x64-10 at counter (b + 1, 0, 0, 0). Another implementation of the same words (the
Triton kernels) must use b + 1 too.

The generator is reused: setting its state takes under a microsecond, constructing one ten times as
long, and a generation needs thousands of small tensors. Each thread has its own, because engines
generate noise in threads.
"""

import functools
import hashlib
import sys
import threading

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
