"""Which problems come next: endless streams of them, shares of a batch, and what is left out.

All of it is deterministic: it follows from seeds and from what was told.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.rollouts import mean_of
from es_cookbook.rl.types import ProblemResult


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Values of one problem so far: how many, at least 1, and their mean."""

    count: int
    mean: float

    def updated(self, value: float) -> "Statistics":
        """With one more value."""
        count = self.count + 1
        return Statistics(count, self.mean + (value - self.mean) / count)


class ReplayBuffer:
    """At most `capacity` problems worth another attempt, each known by a text that stands for it.

    A problem comes back because it is valuable, or because too little is known about it
    (`bound`). Nothing is random: equals are taken in the order in which they came.

    >>> buffer = ReplayBuffer(capacity=2, exploration=0.5)
    >>> buffer.add_group({"a": 0.9, "b": 0.2})
    >>> buffer.update("a", 0.7)
    >>> buffer.sample(1)
    ['a']
    """

    def __init__(self, capacity: int, exploration: float) -> None:
        self._capacity = capacity
        self._exploration = exploration
        self._problems: dict[str, Statistics] = {}
        self._num_values = 0

    def __len__(self) -> int:
        return len(self._problems)

    def add(self, problem: str, value: float) -> None:
        """One more value of a problem, in the buffer or not.

        A problem that is new to a full buffer replaces the one with the lowest mean if its value is
        larger than that, and is forgotten otherwise; it may come again.
        """
        if problem in self._problems:
            self.update(problem, value)
            return
        if len(self._problems) >= self._capacity:
            lowest = min(self._problems, key=lambda name: self._problems[name].mean)
            if value <= self._problems[lowest].mean:
                return
            self._num_values -= self._problems.pop(lowest).count
        self._problems[problem] = Statistics(1, value)
        self._num_values += 1

    def add_group(
        self, values: Mapping[str, float], admitted: Collection[str] | None = None
    ) -> None:
        """`add` each of a generation's problems, in order; new ones only if they are `admitted`."""
        for problem, value in values.items():
            if admitted is None or problem in admitted or problem in self._problems:
                self.add(problem, value)

    def update(self, problem: str, value: float) -> None:
        """One more value of a problem that is in the buffer.

        Raises:
            KeyError: It is not.
        """
        self._problems[problem] = self._problems[problem].updated(value)
        self._num_values += 1

    def sample(self, count: int, without: Collection[str] = ()) -> list[str]:
        """The problems of the largest upper confidence bounds, largest first."""
        bounds = {name: self.bound(name) for name in self._problems if name not in without}
        return sorted(bounds, key=lambda name: -bounds[name])[:count]

    def bound(self, problem: str) -> float:
        """A problem's upper confidence bound: μ + C · √(ln(1 + Σn) / n).

        μ is the mean of its n values; UCB1 (Auer, Cesa-Bianchi and Fischer 2002) with a constant C.

        Raises:
            KeyError: It is not in the buffer.
        """
        known = self._problems[problem]
        spread = math.sqrt(math.log(1 + self._num_values) / known.count)
        return known.mean + self._exploration * spread

    def state(self) -> Mapping[str, Statistics]:
        """Every problem's statistics, in the order in which they came."""
        return dict(self._problems)


@chz.chz
class Replay:
    """How much of a batch is replayed, and what."""

    fraction: float = chz.field(default=0.25, doc="most of a batch that is replayed")
    capacity: int = chz.field(default=4000, doc="most problems that are remembered")
    warmup: int = chz.field(default=5, doc="generations before the first replay")
    exploration: float = chz.field(
        default=0.5, doc="C of the bound: how much what is little known is preferred"
    )
    value: Literal["learnable", "reward", "solved"] = chz.field(
        default="learnable",
        doc="what makes a problem worth replaying: learnable, 4·s·(1 − s) of the share s of "
        "rollouts that solved it; the mean reward; or s itself",
    )

    solved_only: bool = chz.field(
        default=False, doc="take in only problems that a rollout of the generation solved"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "fraction", above=0, at_most=1)
        check_range(self, "capacity", at_least=1)
        check_range(self, "warmup", "exploration", at_least=0)

    def __call__(self) -> ReplayBuffer:
        return ReplayBuffer(self.capacity, self.exploration)

    def admitted(self, results_P: Iterable[ProblemResult]) -> set[str] | None:
        """Problems of a generation that may come into the buffer; None for all."""
        if not self.solved_only:
            return None
        return {result.problem for result in results_P if result.solved > 0}

    def values(self, results_P: Iterable[ProblemResult]) -> dict[str, float]:
        """What each problem of a generation is worth; those without a rollout left out.

        A problem that stands there twice has the mean of its values.
        """
        found: dict[str, list[float]] = {}
        for result in results_P:
            s = result.solved
            value = {"learnable": 4 * s * (1 - s), "reward": result.reward, "solved": s}[self.value]
            if not math.isnan(value):
                found.setdefault(result.problem, []).append(value)
        return {problem: math.fsum(values) / len(values) for problem, values in found.items()}


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
