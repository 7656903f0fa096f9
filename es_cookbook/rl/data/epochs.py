"""The order of a data set's rows, as a pure function of the generation."""

import random

from es_cookbook.common.seeds import derive_seed


class EpochOrder:
    """Every index once per epoch, each epoch in an order of its own.

    Epochs follow each other without a gap, so a batch may end one and begin the next.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._epoch = -1  # whose order is kept, so that a batch shuffles once at most
        self._order: list[int] = []

    def batch(self, generation: int, batch_size: int) -> list[int]:
        """The indices of one generation's batch."""
        start = generation * batch_size
        return [self._at(position) for position in range(start, start + batch_size)]

    def _at(self, position: int) -> int:
        """The index at a position in the endless sequence of epochs."""
        epoch, offset = divmod(position, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self._size))
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(self._order)
        return self._order[offset]
