"""ε(seed): noise that is a pure function of (seed, parameter name, element).

Element i, in C order over the Hugging Face parameter's own name and shape, comes from a
counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so any
element can be generated alone, in any order, on any device, and a shard generates just its part.
Nothing is stored and nothing is drawn: the seed is the noise.

- words: Philox4x64-10 keyed by (seed, hash of the name), in blocks of 4 x 64 bits. Block b is the
  first block of `numpy.random.Philox(key=key, counter=b)`. NumPy increments its counter before it
  generates, so in terms of the published function (Random123), block b is Philox4x64-10 at counter
  (b + 1, 0, 0, 0). Another implementation of the same words (the Triton kernels) uses b + 1 too.
- gaussian: a block is 16 lanes of 16 bits, little end first; a lane indexes the table Q. They are
  drawn by a compiled loop (`loops`), in about half a nanosecond per element.
- rademacher: a block is 256 bits, little end first; a set bit is +1, a clear bit is -1.
- uniform, for stochastic rounding and for phases: (lane + ½) / 65536, so 0 < u < 1, exact in
  float32, with mean ½ exactly.

Q[k] is the normal quantile at (k + 1/2) / 65536, scaled so that the table has variance exactly 1 up
to rounding, as float32. It is antisymmetric, Q[k] = -Q[65535 - k], so its mean is 0. It is computed
when first needed (tens of milliseconds) rather than shipped. Its bits do not depend on the machine:
the quantiles are float64 from one published rational approximation (Wichura's AS241, in the
standard library), whose only calls into libm are a logarithm and a square root, and the closest
that any of them comes to a float32 rounding boundary is thousands of float64 units, where libms
differ by one or two. The checksum is verified on every load.

`Partitions` divide a parameter at random into K groups, run by run of 4,096 elements: run r is in
group ⌊lane · K / 65536⌋, with lane r of (partition, name + ".partition"). A seed says which
partition and which of its groups are its own.

A `Part` is a rectangle of one parameter: the shard that a tensor-parallel rank holds. Noise and
steps are functions of an element's index in the whole parameter, so a rank generates and moves just
its part, and all ranks together hold the same bits as one alone would.

Left out: exact normal tails. The largest gaussian value is about 4.32, the limit of sixteen bits.
"""

import dataclasses
import functools
import hashlib
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.evolution.genome import MAX_SEED

NoiseKind: TypeAlias = Literal["gaussian", "rademacher"]
"""Distribution of an element: standard normal, or -1 and +1 with equal chance."""

WORDS_PER_BLOCK = 4
"""64-bit words in one block."""
GAUSSIANS_PER_BLOCK = 16
SIGNS_PER_BLOCK = 256
LANE_VALUES = 2**16
"""Number of values of a lane."""
_LANE = np.dtype("<u2")
_PIECE = 2**15
"""Signs made at once: their temporaries stay in the cache."""
_SIGNS_OF_BYTE = np.where(
    np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(1), np.float32(-1)
)
"""`[byte][bit]`, the lowest bit first."""


def noise(
    seed: int, name: str, shape: tuple[int, ...], kind: NoiseKind = "gaussian"
) -> NDArray[np.float32]:
    """Return the noise tensor ε(seed, name).

    Args:
        seed: 0 ... 2^63 - 1.
        name: the parameter's Hugging Face name.
        shape: its shape.
        kind: distribution of the elements.

    Raises:
        ValueError: A seed that is not a 63-bit integer.

    >>> noise(7, "weight", (2, 3), "rademacher")
    array([[-1.,  1., -1.],
           [-1.,  1.,  1.]], dtype=float32)
    """
    return noise_range(seed, name, 0, math.prod(shape), kind).reshape(shape)


def noise_of_seeds(
    seeds_S: Sequence[int], name: str, shape: tuple[int, ...], kind: NoiseKind = "gaussian"
) -> NDArray[np.float32]:
    """Return `noise` of many seeds, (seeds, *shape): much faster where tensors are small.

    Raises:
        ValueError: A seed that is not a 63-bit integer.
    """
    out_S = np.empty((len(seeds_S), math.prod(shape)), np.float32)
    _write(seeds_S, name, 0, out_S, kind)
    return out_S.reshape(len(seeds_S), *shape)


def noise_range(
    seed: int,
    name: str,
    start: int,
    stop: int,
    kind: NoiseKind = "gaussian",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return elements `start` ... `stop` - 1 of the flattened noise, without making the others.

    Args:
        seed: 0 ... 2^63 - 1.
        name: the parameter's Hugging Face name.
        start: first element, in C order.
        stop: one past the last.
        kind: distribution of the elements.
        out: output, contiguous float32 with `stop - start` elements; a new array when None.

    Returns:
        `out`, or a new array.

    Raises:
        ValueError: A seed that is not a 63-bit integer.
    """
    if out is None:
        out = np.empty(stop - start, np.float32)
    _write([seed], name, start, out[None], kind)
    return out


def _write(
    seeds_S: Sequence[int], name: str, start: int, out_S: NDArray[np.float32], kind: NoiseKind
) -> None:
    """Write elements `start` ... of each seed's noise, a row of `out_S` each."""
    for seed in (min(seeds_S), max(seeds_S)) if seeds_S else ():
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"a seed must be a 63-bit integer (0 to 2**63 - 1), found {seed}")
    if kind == "gaussian":
        from es_cookbook.evolution.noise.loops import draw

        words_S = np.array(seeds_S, np.uint64)
        draw(words_S, np.uint64(name_key(name)), start, normal_table(), out_S)
    else:
        for seed, out in zip(seeds_S, out_S, strict=True):
            _write_signs(seed, name, start, out)


def _write_signs(seed: int, name: str, start: int, out: NDArray[np.float32]) -> None:
    at, stop = start, start + out.size
    while at < stop:
        end = min(stop, (at // _PIECE + 1) * _PIECE)
        first = at // SIGNS_PER_BLOCK
        eights = words(seed, name, first, -(-end // SIGNS_PER_BLOCK) - first).view(np.uint8)
        skip, piece = at - first * SIGNS_PER_BLOCK, out[at - start : end - start]
        if skip % 8 == 0 and piece.size % 8 == 0:
            eights = eights[skip // 8 : (skip + piece.size) // 8]
            _SIGNS_OF_BYTE.take(eights, axis=0, out=piece.reshape(-1, 8), mode="wrap")
        else:
            piece[:] = _SIGNS_OF_BYTE[eights].reshape(-1)[skip : skip + piece.size]
        at = end


def uniform_range(seed: int, name: str, start: int, stop: int) -> NDArray[np.float32]:
    """Return elements `start` ... `stop` - 1 of the flattened tensor of uniform numbers.

    If a noise tensor has the same name, the two are not independent.
    """
    lanes = lanes_range(seed, name, start, stop).astype(np.float32)
    return (lanes + np.float32(0.5)) / np.float32(65536)


def lanes_range(seed: int, name: str, start: int, stop: int) -> NDArray[np.uint16]:
    """Return the 16-bit lanes of elements `start` ... `stop` - 1: indices into the gaussian table.

    If a noise tensor has the same name, the two are not independent.
    """
    first = start // GAUSSIANS_PER_BLOCK
    found = words(seed, name, first, -(-stop // GAUSSIANS_PER_BLOCK) - first)
    skip = start - first * GAUSSIANS_PER_BLOCK
    return found.view(_LANE)[skip : skip + stop - start]


@functools.cache
def name_key(name: str) -> int:
    """Return the key's second half: 64-bit BLAKE2b of the parameter's name, little end first."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def words(seed: int, name: str, first_block: int, num_blocks: int) -> NDArray[np.uint64]:
    """Return blocks `first_block` ... of the stream of key (seed, `name_key(name)`), 4 words each.

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
    """A bit generator per thread, and a state to write into it: at counter 0, nothing buffered.

    Setting the state takes under a microsecond, a new generator ten times as long, and a generation
    needs thousands of small tensors.
    """

    def __init__(self) -> None:
        self.philox = np.random.Philox(key=0)
        self.state = self.philox.state


_this_thread = _ThisThread()


SCALE = 1.0000101408279616
"""1 / standard deviation of the unscaled quantiles."""
CHECKSUM = "65561716612ffbcbfd947ed80353b542"
"""BLAKE2b-128 of the table's little-endian bytes."""


def normal_quantiles() -> NDArray[np.float64]:
    """Return the table's upper half before rounding to float32, ascending from the median."""
    inverse = NormalDist().inv_cdf
    half = np.array(
        [inverse((k + 0.5) / LANE_VALUES) for k in range(LANE_VALUES // 2, LANE_VALUES)]
    )
    return half * SCALE


@functools.cache
def normal_table() -> NDArray[np.float32]:
    """Return Q, read-only.

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
    """Return BLAKE2b-128 of the values' little-endian bytes."""
    return hashlib.blake2b(values.astype("<f4").tobytes(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Some neighbouring rows and columns of a parameter.

    Rows are its first axis; all other axes together are its columns (one, for a vector or scalar).

    Attributes:
        rows: first row, and one past the last.
        columns: first column, and one past the last.
        width: columns of the whole parameter.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    width: int

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Return all of a parameter of this shape."""
        width = math.prod(shape[1:])
        return cls((0, math.prod(shape[:1])), (0, width), width)

    @classmethod
    def within(cls, shape: tuple[int, ...], rows: slice, columns: slice) -> Self:
        """Return these rows and columns of a parameter of this shape."""
        height, width = shape
        return cls(rows.indices(height)[:2], columns.indices(width)[:2], width)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def spans(self) -> Iterator[range]:
        """Yield its elements in the whole parameter, in C order, as runs of maximal length."""
        first, last = self.columns
        if (first, last) == (0, self.width):
            yield range(self.rows[0] * self.width, self.rows[1] * self.width)
            return
        for row in range(*self.rows):
            yield range(row * self.width + first, row * self.width + last)


SEEDS_OF_PARTITION = 2**16
"""Seeds with the same quotient by this have the same partition."""
RUN = 2**12
"""Elements of a parameter that are in the same group of every partition."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partitions:
    """Random divisions of the parameters into groups; a seed belongs to one group.

    Attributes:
        number: number of groups.
    """

    number: int = 1

    def group(self, seed: int) -> int:
        """Return a seed's group in its partition."""
        return seed % SEEDS_OF_PARTITION % self.number

    def runs(self, name: str, seed: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield runs of elements `start` ... `stop` - 1 of a parameter that are in a seed's group.

        Yields:
            First elements, and those past the last.
        """
        if self.number == 1:
            yield start, stop
            return
        first, group = start // RUN, self.group(seed)
        lanes_R = lanes_range(partition_of(seed), partition_name(name), first, -(-stop // RUN))
        for r, lane in enumerate(lanes_R.tolist(), first):
            if lane * self.number // LANE_VALUES == group:
                yield max(r * RUN, start), min((r + 1) * RUN, stop)


UNDIVIDED = Partitions()


def partition_of(seed: int) -> int:
    """Return the seed of the partition that a genome's seed has."""
    return seed // SEEDS_OF_PARTITION


def partition_seed(seed: int, i: int) -> int:
    """Return seed i of those that have the partition of `seed`.

    >>> partition_seed(2**16 + 5, 2) == 2**16 + 2
    True
    """
    return partition_of(seed) * SEEDS_OF_PARTITION + i


def partition_name(name: str) -> str:
    """Return the key of the words that divide a parameter."""
    return f"{name}.partition"
