"""Schedules: factors on a setting over a run (σ, learning rate, temperature, a part's weight).

The base value is multiplied by `schedule(generation, num_generations)`, so
`optimizer.learning_rate=5e-4` stays a number and `optimizer.learning_rate_schedule=cosine` decays
it. Generation 0 has factor 1, except in a table and a warm-up; `final` is the factor of generation
`num_generations`, just after the last one, so a schedule that decays to zero wastes no generation.

Left out: schedules that depend on rewards; see optimizers (`adaptive_sigma`) and objectives.
"""

import math
from abc import ABC, abstractmethod
from itertools import pairwise

import chz

from es_cookbook.common.checks import check_types, in_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import plural

SCHEDULE_NAMES = Registered("schedules")
"""Names on the command line."""


@chz.chz
class Schedule(ABC):
    """A factor for each generation."""

    _types = chz.validate(check_types)

    @abstractmethod
    def __call__(self, generation: int, num_generations: int) -> float:
        """Return the factor of `generation`, counted from 0, in a run of `num_generations`."""


def schedule_field(doc: str, default: str = "none") -> Schedule:
    """Return the field of a config for a factor over the run; constant by default."""
    return Names(SCHEDULE_NAMES, default).field(doc)


@chz.chz
class Constant(Schedule):
    """1 throughout."""

    def __call__(self, generation: int, num_generations: int) -> float:
        return 1.0


@chz.chz
class Linear(Schedule):
    """Linear decay from 1 to `final`.

    >>> [Linear()(generation, 4) for generation in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    final: float = chz.field(default=0.0, doc="factor just after the last generation")

    _final = in_range("final", at_least=0)

    def __call__(self, generation: int, num_generations: int) -> float:
        return 1.0 + (self.final - 1.0) * progress(generation, num_generations)


@chz.chz
class Cosine(Linear):
    """Half-cosine decay from 1 to `final`: slow at both ends.

    >>> [round(Cosine()(generation, 4), 3) for generation in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """

    def __call__(self, generation: int, num_generations: int) -> float:
        """Return the cosine, final + (1 - final) · (1 + cos(π · progress)) / 2."""
        cosine = math.cos(math.pi * progress(generation, num_generations))
        return self.final + (1.0 - self.final) * (1.0 + cosine) / 2


@chz.chz
class Exponential(Schedule):
    """Exponential decay from 1 to `final`, by the same ratio every generation.

    >>> [round(Exponential(final=0.0625)(generation, 4), 4) for generation in range(4)]
    [1.0, 0.5, 0.25, 0.125]
    """

    final: float = chz.field(default=0.1, doc="factor just after the last generation, above 0")

    _final = in_range("final", above=0)

    def __call__(self, generation: int, num_generations: int) -> float:
        return self.final ** progress(generation, num_generations)


@chz.chz
class Table(Schedule):
    """Factors at given generations and straight lines between them.

    The table begins at generation 0, so that every generation has a factor; after its last entry
    the last factor is used.

    >>> table = Table(generations=(0, 10, 20), factors=(1.0, 1.0, 0.5))
    >>> [table(generation, 100) for generation in (0, 10, 15, 99)]
    [1.0, 1.0, 0.75, 0.5]
    """

    generations: tuple[int, ...] = chz.field(default=(0,), doc="generations, increasing: 0,100,500")
    factors: tuple[float, ...] = chz.field(default=(1.0,), doc="the factor at each: 1,0.5,0.1")

    @chz.validate
    def _table(self) -> None:
        if len(self.generations) != len(self.factors) or not self.generations:
            raise ConfigError(
                "generations of a table must be as many as its factors, at least one; "
                f"found {plural(len(self.generations), 'generation')} and "
                f"{plural(len(self.factors), 'factor')}"
            )
        if any(later <= earlier for earlier, later in pairwise(self.generations)):
            raise ConfigError(f"generations of a table must rise, found {list(self.generations)}")
        if self.generations[0] != 0:
            raise ConfigError(
                "generations of a table must begin at 0, or those before its first have no factor; "
                f"found {list(self.generations)}"
            )
        for factor in self.factors:
            if not (math.isfinite(factor) and factor >= 0):
                raise ConfigError(f"factors must be 0 or more, found {factor}")

    def __call__(self, generation: int, num_generations: int) -> float:
        """Interpolate linearly in the generation; the run's length does not matter."""
        points = zip(self.generations, self.factors, strict=True)
        for (start, first), (end, last) in pairwise(points):
            if generation <= end:
                return first + (last - first) * (generation - start) / (end - start)
        return self.factors[-1]


@chz.chz
class HotSteps(Schedule):
    """A table, and another factor in every n-th generation after its end.

    For example a temperature that decays, with occasional generations that explore.

    >>> hot = HotSteps(schedule=Table(generations=(0, 2), factors=(1.0, 0.3)), every=3)
    >>> [round(hot(generation, 100), 2) for generation in range(9)]
    [1.0, 0.65, 0.3, 0.3, 0.3, 1.0, 0.3, 0.3, 1.0]
    """

    schedule: Table = chz.field(
        default=Table(generations=(0, 3000), factors=(1.0, 0.3)), doc="all other generations"
    )
    every: int = chz.field(default=100, doc="generations between hot ones")
    factor: float = chz.field(default=1.0, doc="factor of a hot generation")

    _every = in_range("every", at_least=1)
    _factor = in_range("factor", at_least=0)

    def __call__(self, generation: int, num_generations: int) -> float:
        """Return the table's factor, or `factor` every `every` generations after its end."""
        after = generation - self.schedule.generations[-1]
        is_hot = after > 0 and after % self.every == 0
        return self.factor if is_hot else self.schedule(generation, num_generations)


@chz.chz
class WarmUp(Schedule):
    """Another schedule, times a factor that rises from 1/n to 1 over the first n generations.

    >>> rising = WarmUp(over=2, then=Linear())
    >>> [rising(generation, 4) for generation in range(4)]
    [0.5, 0.75, 0.5, 0.25]
    """

    over: int = chz.field(default=10, doc="n, the generations over which it rises")
    then: Schedule = schedule_field("the other schedule; it starts in generation 0 as well")

    _over = in_range("over", at_least=1)

    def __call__(self, generation: int, num_generations: int) -> float:
        return warmup(generation, self.over) * self.then(generation, num_generations)


def progress(generation: int, num_generations: int) -> float:
    """Return the share of a run that is complete before `generation`, in [0, 1]."""
    return min(generation / num_generations, 1.0) if num_generations > 0 else 0.0


def warmup(generation: int, num_warmup_generations: int) -> float:
    """Return the factor of a linear warm-up over n generations: 1/n, 2/n, … 1, and then 1.

    >>> [warmup(generation, 4) for generation in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min((generation + 1) / num_warmup_generations, 1.0) if num_warmup_generations else 1.0
