"""Which problems come next: endless streams of them, shares of a batch, and what is left out.

All of it is deterministic: it follows from seeds and from what was told.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.rollouts import mean_of


class Stream:
    """Problems without end: each once per epoch, and epochs follow each other without a gap.

    Args:
        epoch: the order of an epoch, counted from 0: a permutation of the stream's problems.
    """

    def __init__(self, epoch: Callable[[int], Sequence[int]]) -> None:
        self._epoch = epoch
        self._num_epochs = 0
        self._left: list[int] = []

    def take(self, count: int, is_usable: Callable[[int], bool]) -> list[int]:
        """The next problems, those left out that are not usable: their turn is over.

        Where a whole epoch has none that is usable, all are.
        """
        taken: list[int] = []
        passed, size = 0, math.inf
        while len(taken) < count:
            if not self._left:
                self._left = list(reversed(self._epoch(self._num_epochs)))
                self._num_epochs += 1
                size = len(self._left)
            index = self._left.pop()
            if passed >= size or is_usable(index):
                taken.append(index)
                passed = 0 if passed < size else passed
            else:
                passed += 1
        return taken


def interleaved(parts: Sequence[Sequence[int]]) -> list[int]:
    """All parts spread evenly over each other: sorted by (i + ½) / length of the part.

    >>> interleaved([[0, 1, 2, 3], [10, 11]])
    [0, 10, 1, 2, 11, 3]
    """
    places = [
        ((i + 0.5) / len(part), p, index)
        for p, part in enumerate(parts)
        for i, index in enumerate(part)
    ]
    return [index for _, _, index in sorted(places)]


def quotas(weights: Sequence[float], count: int, offset: float) -> list[int]:
    """`count` places shared out by weight, each share to within one place: systematic sampling.

    With `offset` drawn uniformly from [0, 1), the expected shares are exact.

    >>> quotas([1, 1, 2], 8, 0.5)
    [2, 2, 4]
    """
    reached = list(itertools.accumulate(weights))
    ends = [math.floor(count * (upto / reached[-1]) + offset) for upto in reached]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


@chz.chz
class Curriculum:
    """Shares of a batch by how well problems of a kind were solved of late.

    A kind is a part's problems of the same tags. With s the mean share of rollouts that solved
    them, over the last `window` generations that had any, a kind's share is its own times
    floor + (1 − floor) · f(s).
    """

    favour: Literal["learnable", "hard", "easy"] = chz.field(
        default="learnable",
        doc="kinds that get more: learnable, f = 4·s·(1 − s), the variance of solving them; hard, "
        "f = 1 − s; easy, f = s",
    )
    window: int = chz.field(default=5, doc="generations that count")
    floor: float = chz.field(default=0.1, doc="of its own share that a kind keeps, above 0")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "window", at_least=1)
        check_range(self, "floor", above=0, at_most=1)

    def factor(self, solved: float) -> float:
        """On a kind's share."""
        f = {"learnable": 4 * solved * (1 - solved), "hard": 1 - solved, "easy": solved}
        return self.floor + (1 - self.floor) * min(max(f[self.favour], 0.0), 1.0)


class Recent:
    """The mean of what was told in the last generations."""

    def __init__(self, window: int) -> None:
        self._means: deque[float] = deque(maxlen=window)

    def tell(self, values: Sequence[float]) -> None:
        """One generation's values; NaN are left out."""
        mean = mean_of(values)
        if not math.isnan(mean):
            self._means.append(mean)

    @property
    def mean(self) -> float | None:
        """Over generations; None before the first."""
        return math.fsum(self._means) / len(self._means) if self._means else None


@chz.chz
class Filter:
    """Leaves out, for some generations, problems from which nothing can be learned now."""

    solved_by_all: bool = chz.field(default=True, doc="leave out what every rollout solved")
    solved_by_none: bool = chz.field(default=True, doc="leave out what no rollout solved")
    generations: int = chz.field(default=10, doc="for how many; then they are tried again")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "generations", at_least=1)
        if not (self.solved_by_all or self.solved_by_none):
            raise ConfigError("a filter leaves out solved_by_all, solved_by_none or both")

    def leaves_out(self, solved: float) -> bool:
        """Whether a problem with this share of rollouts that solved it is left out."""
        return (self.solved_by_all and solved >= 1) or (self.solved_by_none and solved <= 0)
