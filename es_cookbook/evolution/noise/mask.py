"""Masks: a fixed random subset of a parameter's elements, from the same words as the noise.

Element i, in C order, is in the mask if lane i of the 16-bit lanes (see
`es_cookbook.evolution.noise`) of (mask seed, name + ".mask") is below density · 65536. So a mask is
never stored, and a shard, or a kernel on a GPU, generates just its part.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from es_cookbook.evolution.noise.tensors import lanes_range

LANE_VALUES = 2**16
"""Number of values of a lane: densities are multiples of its inverse."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """A random subset of a parameter's elements, given by a seed.

    Attributes:
        seed: 0 ... 2⁶³ - 1.
        threshold: about this many of 65,536 elements are in it.
    """

    seed: int
    threshold: int

    def range(self, name: str, start: int, stop: int) -> NDArray[np.bool]:
        """Whether elements `start` ... `stop` - 1 of a parameter are in it."""
        return lanes_range(self.seed, mask_name(name), start, stop) < self.threshold


def mask_name(name: str) -> str:
    """Key of the words of a parameter's mask."""
    return f"{name}.mask"
