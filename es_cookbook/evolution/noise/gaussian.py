"""The table Q: sixteen random bits -> a standard-normal number.

Q[k] is the normal quantile at (k + 1/2) / 65536, scaled so that the table has variance exactly 1 up
to rounding, as float32. It is antisymmetric, Q[k] = -Q[65535 - k], so its mean is 0.

It is computed when first needed (tens of milliseconds) rather than shipped. Its bits do not depend
on the machine: the quantiles are float64 from one published rational approximation (Wichura's
AS241, in the standard library), whose only calls into libm are a logarithm and a square root, and
the closest that any of them comes to a float32 rounding boundary is thousands of float64 units,
where libms differ by one or two. The checksum is verified on every load.
"""

import functools
import hashlib
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

SIZE = 2**16
SCALE = 1.0000101408279616
"""1 / standard deviation of the unscaled quantiles."""
CHECKSUM = "65561716612ffbcbfd947ed80353b542"
"""BLAKE2b-128 of the table's little-endian bytes."""


def quantiles() -> NDArray[np.float64]:
    """The upper half of the table before it is rounded to float32, ascending from the median."""
    inverse = NormalDist().inv_cdf
    half = np.array([inverse((k + 0.5) / SIZE) for k in range(SIZE // 2, SIZE)])
    return half * SCALE


@functools.cache
def table() -> NDArray[np.float32]:
    """Q, read-only.

    Raises:
        RuntimeError: This machine computes another table than the one all noise is defined by.
    """
    half = quantiles().astype(np.float32)
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
