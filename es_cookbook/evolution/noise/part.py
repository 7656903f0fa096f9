"""A rectangle of one parameter: the shard that a tensor-parallel rank holds.

Noise and steps are functions of an element's index in the whole parameter, so a rank generates and
moves just its part, and all ranks together hold the same bits as one alone would.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Self


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

    @property
    def shape(self) -> tuple[int, int]:
        """Its number of rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def spans(self) -> Iterator[range]:
        """Indices of its elements in the whole parameter, C order, as runs of maximal length."""
        first, last = self.columns
        if (first, last) == (0, self.width):
            yield range(self.rows[0] * self.width, self.rows[1] * self.width)
            return
        for row in range(*self.rows):
            yield range(row * self.width + first, row * self.width + last)
