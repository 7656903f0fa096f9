"""Selection of problems: endless streams, shares of a batch, filters, and replay.

All of it is deterministic: it follows from seeds and from what was told.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import chz

from es_cookbook.common.checks import check_range, in_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.rollouts import mean_of
from es_cookbook.rl.types import ProblemResult


@chz.chz
class Replay:
    """Replay of earlier problems."""

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

    _fraction = in_range("fraction", above=0, at_most=1)
    _capacity = in_range("capacity", at_least=1)
    _not_negative = in_range("warmup", "exploration", at_least=0)

    def values(self, results_P: Iterable[ProblemResult]) -> dict[str, float]:
        """Return the value of each problem of a generation that has a rollout.

        A problem that occurs twice has the mean of its values.
        """
        found: dict[str, list[float]] = {}
        for result in results_P:
            s = result.solved
            value = {"learnable": 4 * s * (1 - s), "reward": result.reward, "solved": s}[self.value]
            found.setdefault(result.problem, []).append(value)
        means = {problem: mean_of(values) for problem, values in found.items()}
        return {problem: mean for problem, mean in means.items() if not math.isnan(mean)}


class ReplayBuffer:
    """Problems worth another attempt, each known by its key.

    A problem comes back because it is valuable, or because too little is known about it
    (`bounds`). Nothing is random: equals are taken in the order in which they came.

    Attributes:
        known: problem -> number of its values and their mean, in the order in which problems
            came.
    """

    def __init__(self, config: Replay) -> None:
        self._config = config
        self.known: dict[str, tuple[int, float]] = {}

    def tell(self, results_P: Sequence[ProblemResult]) -> None:
        """Take in a generation's results; of new problems only those that may come in.

        A problem that is new to a full buffer replaces the one with the lowest mean if its value is
        larger than that, and is forgotten otherwise; it may come again.
        """
        solved = {result.problem for result in results_P if result.solved > 0}
        for problem, value in self._config.values(results_P).items():
            if problem in self.known:
                count, mean = self.known[problem]
                self.known[problem] = count + 1, mean + (value - mean) / (count + 1)
            elif problem in solved or not self._config.solved_only:
                self._add(problem, value)

    def _add(self, problem: str, value: float) -> None:
        if len(self.known) >= self._config.capacity:
            lowest = min(self.known, key=lambda name: self.known[name][1])
            if value <= self.known[lowest][1]:
                return
            del self.known[lowest]
        self.known[problem] = 1, value

    def sample(self, count: int, without: Collection[str] = ()) -> list[str]:
        """Return the problems of the largest upper confidence bounds, largest first."""
        bounds = {name: b for name, b in self.bounds().items() if name not in without}
        return sorted(bounds, key=lambda name: -bounds[name])[:count]

    def bounds(self) -> Mapping[str, float]:
        """Return each problem's upper confidence bound: μ + C · √(ln(1 + Σn) / n).

        μ is the mean of its n values; UCB1 (Auer, Cesa-Bianchi and Fischer 2002) with a constant C.
        """
        spread = math.log(1 + sum(count for count, _ in self.known.values()))
        return {
            name: mean + self._config.exploration * math.sqrt(spread / count)
            for name, (count, mean) in self.known.items()
        }


class Stream:
    """Problems without end: each once per epoch, and epochs follow each other without a gap.

    Args:
        epoch: the order of an epoch, counted from 0: a permutation of the stream's problems.
        size: number of problems.
    """

    def __init__(self, epoch: Callable[[int], Sequence[int]], size: int) -> None:
        self._indices = itertools.chain.from_iterable(map(epoch, itertools.count()))
        self._size = size

    def take(self, count: int, is_usable: Callable[[int], bool]) -> list[int]:
        """Return the next problems; those that are not usable are passed over.

        Where a whole epoch has none that is usable, all are.
        """
        taken: list[int] = []
        passed = 0
        while len(taken) < count:
            index = next(self._indices)
            if passed >= self._size or is_usable(index):
                taken.append(index)
                passed = 0 if passed < self._size else passed
            else:
                passed += 1
        return taken


def interleaved(parts: Sequence[Sequence[int]]) -> list[int]:
    """Spread all parts evenly: sort by (i + ½) / length of the part.

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
    """Divide `count` places by weight, to within one place: systematic sampling.

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
    floor: float = chz.field(default=0.1, doc="least factor on the share of a kind, above 0")

    _window = in_range("window", at_least=1, at_most=2**31)
    _floor = in_range("floor", above=0, at_most=1)

    def factor(self, solved: float) -> float:
        f = {"learnable": 4 * solved * (1 - solved), "hard": 1 - solved, "easy": solved}
        return self.floor + (1 - self.floor) * min(max(f[self.favour], 0.0), 1.0)


@chz.chz
class Filter:
    """Leaves out, for some generations, problems from which nothing can be learned now."""

    solved_by_all: bool = chz.field(default=True, doc="leave out what every rollout solved")
    solved_by_none: bool = chz.field(default=True, doc="leave out what no rollout solved")
    generations: int = chz.field(default=10, doc="number of generations; then they are tried again")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "generations", at_least=1)
        if not (self.solved_by_all or self.solved_by_none):
            raise ConfigError("a filter leaves out solved_by_all, solved_by_none or both")

    def leaves_out(self, solved: float) -> bool:
        """Return whether to leave out a problem with this share of solved rollouts."""
        return (self.solved_by_all and solved >= 1) or (self.solved_by_none and solved <= 0)
