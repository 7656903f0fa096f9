"""What vLLM's ranks answer, put together."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from es_cookbook.common.errors import EngineError

FingerprintPiece: TypeAlias = Sequence[str | int]
"""Name, first and last row, first and last column, and what that part adds to the fingerprint."""


def merge_fingerprints(
    pieces_of_ranks: Sequence[Sequence[FingerprintPiece]], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """The centre's fingerprint: the sum over its parts, those that several ranks have once.

    Raises:
        EngineError: Ranks disagree about a part, or have not all of a parameter between them.
    """
    values: dict[tuple[str | int, ...], int] = {}
    for pieces in pieces_of_ranks:
        for *place, value in pieces:
            if values.setdefault(tuple(place), int(value)) != value:
                raise EngineError(
                    f"vLLM's ranks disagree about {place[0]}: the engine must be restored"
                )
    covered: dict[str, int] = {}
    for name, row, end_row, column, end_column in values:
        area = (int(end_row) - int(row)) * (int(end_column) - int(column))
        covered[str(name)] = covered.get(str(name), 0) + area
    for name, shape in shapes.items():
        if covered.get(name) != math.prod(shape):
            raise EngineError(
                f"vLLM's ranks have {covered.get(name, 0)} elements of {name} between them, and it "
                f"has {math.prod(shape)}"
            )
    return sum(values.values()) % 2**64
