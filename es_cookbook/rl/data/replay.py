"""A replay buffer: problems worth another attempt, chosen by upper confidence bounds (UCB1).

Each problem has a running mean μ of its value and the number of times n that it was attempted. The
ones to replay are those with the largest

    μ + C · √(ln(1 + Σn) / n)        (Auer, Cesa-Bianchi and Fischer 2002, with a constant C)

so a problem comes back because it is valuable, or because too little is known about it. What a
problem is worth is the caller's to say. Nothing is random: equals are taken in the order in which
they came.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.rl.types import ProblemResult


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Values of one problem so far, by Welford's method.

    Attributes:
        count: how many, at least 1.
        mean: of them.
        m2: sum of their squared distances from the mean.
    """

    count: int
    mean: float
    m2: float = 0.0

    def updated(self, value: float) -> "Statistics":
        """With one more value."""
        count = self.count + 1
        above = value - self.mean
        mean = self.mean + above / count
        return Statistics(count, mean, self.m2 + above * (value - mean))

    @property
    def std(self) -> float:
        """Of the values, as of a sample; 0 of a single one."""
        return math.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else 0.0


class ReplayBuffer:
    """At most `capacity` problems, each known by a text that stands for it.

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
        """Problems in it."""
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
        """A problem's upper confidence bound.

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
        """An empty buffer."""
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
