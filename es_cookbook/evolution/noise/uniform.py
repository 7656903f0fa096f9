"""Uniform numbers from the same words as the noise: for stochastic rounding, and for phases.

Element i is (lane + ½) / 65536, its lane as in `gaussian`: 0 < u < 1, exact in float32, with mean ½
exactly.
"""

import numpy as np
from numpy.typing import NDArray

from es_cookbook.evolution.noise.tensors import lanes_range


def uniform_range(seed: int, name: str, start: int, stop: int) -> NDArray[np.float32]:
    """Elements `start` ... `stop` - 1 of the flattened tensor of uniform numbers.

    If a noise tensor has the same name, the two are not independent.
    """
    lanes = lanes_range(seed, name, start, stop).astype(np.float32)
    return (lanes + np.float32(0.5)) / np.float32(65536)
