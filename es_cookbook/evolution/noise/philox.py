"""The random words under all noise: Philox4x64-10, exactly the stream of `numpy.random.Philox`.

Block b of the stream is the first block that `numpy.random.Philox(key=key, counter=b)` gives. NumPy increments its
counter before it generates, so in terms of the published function (Random123), block b is Philox4x64-10 at counter
(b + 1, 0, 0, 0). Anything that makes the same words elsewhere (the Triton twin) must use b + 1 too.

The generator is reused: setting the state of one costs under a microsecond, making one costs ten times that, and a
generation asks for thousands of small tensors. Each thread has its own, because engines make noise in threads.
"""

import functools
import hashlib
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

    Args:
        seed: 0 ... 2^63 - 1.
        name: the parameter's name.
        first_block: 0 ... 2^63 - 1.
        num_blocks: how many.

    Returns:
        `4 * num_blocks` words, little-endian in memory on every machine.
    """
    generator = _this_thread.generator
    generator.key[0] = seed
    generator.key[1] = name_key(name)
    generator.counter[0] = first_block
    generator.philox.state = generator.state
    drawn = generator.philox.random_raw(WORDS_PER_BLOCK * num_blocks)
    return drawn.astype("<u8", copy=False)


class _Generator:
    """One NumPy bit generator, and a state to write into it whose arrays we keep."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.key = np.zeros(2, np.uint64)
        self.counter = np.zeros(4, np.uint64)
        self.state = {
            "bit_generator": "Philox",
            "state": {"counter": self.counter, "key": self.key},
            "buffer": np.zeros(WORDS_PER_BLOCK, np.uint64),
            "buffer_pos": WORDS_PER_BLOCK,  # Nothing buffered: the next word begins a block.
            "has_uint32": 0,
            "uinteger": 0,
        }


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.generator = _Generator()


_this_thread = _ThisThread()
