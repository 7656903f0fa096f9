"""From words to noise and uniform numbers: whole tensors, and any range of elements.

Gaussian noise is drawn by a compiled loop (`drawing`), in a microsecond or two and half a
nanosecond an element; signs are unpacked by NumPy, in pieces whose temporaries stay in the cache.

`Partitions` divide a parameter at random into K groups, run by run of 4,096 elements: run r is in
group ⌊lane · K / 65536⌋, with lane r of (partition, name + ".partition"). A seed says which
partition and which of its groups are its own.

Uniform numbers, for stochastic rounding and for phases, are (lane + ½) / 65536: 0 < u < 1, exact in
float32, with mean ½ exactly.

A `Part` is a rectangle of one parameter: the shard that a tensor-parallel rank holds. Noise and
steps are functions of an element's index in the whole parameter, so a rank generates and moves just
its part, and all ranks together hold the same bits as one alone would.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.evolution.noise import philox

NoiseKind: TypeAlias = Literal["gaussian", "rademacher"]
"""Distribution of an element: standard normal, or -1 and +1 with equal chance."""

GAUSSIANS_PER_BLOCK = 16
SIGNS_PER_BLOCK = 256
_LANE = np.dtype("<u2")
_PIECE = 2**15
"""Elements made at once, a multiple of both: 128 KiB of float32, and twice that of indices."""

_SIGNS_OF_BYTE = np.where(
    np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(1), np.float32(-1)
)
"""`[byte][bit]`, the lowest bit first."""


def noise(
    seed: int, name: str, shape: tuple[int, ...], kind: NoiseKind = "gaussian"
) -> NDArray[np.float32]:
    """The noise tensor ε(seed, name).

    Args:
        seed: 0 ... 2^63 - 1.
        name: the parameter's Hugging Face name.
        shape: its shape.
        kind: distribution of the elements.

    Raises:
        ValueError: A seed or kind that does not fit.

    >>> noise(7, "weight", (2, 3), "rademacher")
    array([[-1.,  1., -1.],
           [-1.,  1.,  1.]], dtype=float32)
    """
    return noise_range(seed, name, 0, math.prod(shape), kind).reshape(shape)


def noise_of_seeds(
    seeds_S: Sequence[int], name: str, shape: tuple[int, ...], kind: NoiseKind = "gaussian"
) -> NDArray[np.float32]:
    """`noise` of many seeds at once, (seeds, *shape): much faster where tensors are small.

    Raises:
        ValueError: A seed or kind that does not fit.
    """
    if seeds_S:
        check_seed(min(seeds_S))
        check_seed(max(seeds_S))
    size = math.prod(shape)
    out_S = np.empty((len(seeds_S), size), np.float32)
    if kind == "gaussian":
        from es_cookbook.evolution.noise.loops import draw_gaussians

        draw_gaussians(seeds_S, name, 0, out_S)
    else:
        for out, seed in zip(out_S, seeds_S, strict=True):
            noise_range(seed, name, 0, size, kind, out=out)
    return out_S.reshape(len(seeds_S), *shape)


def noise_range(
    seed: int,
    name: str,
    start: int,
    stop: int,
    kind: NoiseKind = "gaussian",
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Elements `start` ... `stop` - 1 of the flattened noise tensor, without generating the others.

    Args:
        seed: 0 ... 2^63 - 1.
        name: the parameter's Hugging Face name.
        start: first element, in C order.
        stop: one past the last.
        kind: distribution of the elements.
        out: where to write, contiguous float32 with `stop - start` elements; a new array when None.

    Returns:
        `out`, or a new array.

    Raises:
        ValueError: A seed, range, kind or `out` that does not fit.
    """
    check_seed(seed)
    if not 0 <= start <= stop:
        raise ValueError(f"a range must be 0 <= start <= stop, found {start} and {stop}")
    if out is None:
        out = np.empty(stop - start, np.float32)
    elif out.shape != (stop - start,) or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be contiguous float32 of shape ({stop - start},), "
            f"found {out.dtype} of shape {out.shape}"
        )
    if kind not in ("gaussian", "rademacher"):
        raise ValueError(f"noise is 'gaussian' or 'rademacher', found {kind!r}")
    if kind == "gaussian":
        from es_cookbook.evolution.noise.loops import draw_gaussians

        draw_gaussians([seed], name, start, out[None])
        return out
    at = start
    while at < stop:
        end = min(stop, (at // _PIECE + 1) * _PIECE)
        first_block = at // SIGNS_PER_BLOCK
        words = philox.words(seed, name, first_block, -(-end // SIGNS_PER_BLOCK) - first_block)
        _write_signs(words, at - first_block * SIGNS_PER_BLOCK, out[at - start : end - start])
        at = end
    return out


def lanes_range(seed: int, name: str, start: int, stop: int) -> NDArray[np.uint16]:
    """The 16-bit lanes of elements `start` ... `stop` - 1, the indices into the gaussian table.

    If a noise tensor has the same name, the two are not independent.
    """
    first = start // GAUSSIANS_PER_BLOCK
    words = philox.words(seed, name, first, -(-stop // GAUSSIANS_PER_BLOCK) - first)
    skip = start - first * GAUSSIANS_PER_BLOCK
    return words.view(_LANE)[skip : skip + stop - start]


def check_seed(seed: int) -> None:
    """Refuse a seed that is none."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"a seed must be a 63-bit integer (0 to 2**63 - 1), found {seed}")


def _write_signs(words: NDArray[np.uint64], skip: int, out: NDArray[np.float32]) -> None:
    eights = words.view(np.uint8)
    if skip % 8 == 0 and out.size % 8 == 0:
        eights = eights[skip // 8 : (skip + out.size) // 8]
        _SIGNS_OF_BYTE.take(eights, axis=0, out=out.reshape(-1, 8), mode="wrap")
    else:
        out[:] = _SIGNS_OF_BYTE[eights].reshape(-1)[skip : skip + out.size]


LANE_VALUES = 2**16
"""Number of values of a lane."""


SEEDS_OF_PARTITION = 2**16
"""Seeds with the same quotient by this have the same partition."""
RUN = 2**12
"""Elements of a parameter that are in the same group of every partition."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partitions:
    """Random divisions of the parameters into groups, of which a seed has one.

    Attributes:
        number: of groups.
    """

    number: int = 1

    def group(self, seed: int) -> int:
        """Which group of its partition a seed has."""
        return seed % SEEDS_OF_PARTITION % self.number

    def runs(self, name: str, seed: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Which of elements `start` ... `stop` - 1 of a parameter are in a seed's group.

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
    """Seed of the partition that a genome's seed has."""
    return seed // SEEDS_OF_PARTITION


def partition_seed(seed: int, i: int) -> int:
    """Seed i of those that have the partition of `seed`.

    >>> partition_seed(2**16 + 5, 2) == 2**16 + 2
    True
    """
    return partition_of(seed) * SEEDS_OF_PARTITION + i


def partition_name(name: str) -> str:
    """Key of the words that divide a parameter."""
    return f"{name}.partition"


def uniform_range(seed: int, name: str, start: int, stop: int) -> NDArray[np.float32]:
    """Elements `start` ... `stop` - 1 of the flattened tensor of uniform numbers.

    If a noise tensor has the same name, the two are not independent.
    """
    lanes = lanes_range(seed, name, start, stop).astype(np.float32)
    return (lanes + np.float32(0.5)) / np.float32(65536)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Some neighbouring rows and columns of a parameter.

    Rows are its first axis; all other axes together are its columns (one, for a vector or scalar).

    Attributes:
        rows: first row, and one past the last.
        columns: first column, and one past the last.
        width: columns of the whole parameter.

    Raises:
        ValueError: There are no such rows or columns.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    width: int

    def __post_init__(self) -> None:
        if not (0 <= self.rows[0] <= self.rows[1] and 0 <= self.columns[0] <= self.columns[1]):
            raise ValueError(f"a part must begin at 0 or later and end after that, found {self}")
        if self.columns[1] > self.width:
            raise ValueError(f"a parameter of {self.width} columns has no part {self}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """All of a parameter of this shape."""
        width = math.prod(shape[1:])
        return cls((0, math.prod(shape[:1])), (0, width), width)

    @classmethod
    def within(cls, shape: tuple[int, ...], rows: slice, columns: slice) -> Self:
        """These rows and columns of a parameter of this shape."""
        height, width = shape
        return cls(rows.indices(height)[:2], columns.indices(width)[:2], width)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def spans(self) -> Iterator[range]:
        """Indices of its elements in the whole parameter, C order, as runs of maximal length."""
        first, last = self.columns
        if (first, last) == (0, self.width):
            yield range(self.rows[0] * self.width, self.rows[1] * self.width)
            return
        for row in range(*self.rows):
            yield range(row * self.width + first, row * self.width + last)
