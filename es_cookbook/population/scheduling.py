"""Scheduling of genomes on engines: blocks of a generation, and generations that overlap.

    es-cookbook countdown max_staleness=1 engine=ray engine.num_engines=2

Which genomes an engine runs changes no rollout, so none of it is in a run's history.
"""

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable
from statistics import fmean
from typing import Generic, TypeAlias, TypeVar

import anyio

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Step

_T = TypeVar("_T")


@dataclasses.dataclass(eq=False, slots=True)
class _Block:
    """Genomes that an engine has taken, and when."""

    range_G: range
    label: str
    began: float


class BlockScheduler:
    """Hands out the genomes of generation after generation, so that unequal engines end together.

    No genome belongs to an engine before the engine takes it. A free engine takes its share of the
    generation: by its speed, which is that of its last block. An engine whose speed is not known
    takes half of its share. The rest is shared in the same way by engines that are free
    first.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._speeds: dict[str, float] = {}
        """Genomes per second, by label."""
        self._taken: collections.Counter[str] = collections.Counter()
        """Genomes of this generation that each engine has taken."""
        self._num_genomes = 0
        self._next = 0

    @property
    def num_left(self) -> int:
        """Genomes that no engine has taken."""
        return self._num_genomes - self._next

    def begin(self, num_genomes: int) -> None:
        """Begin another generation; blocks of the one before may still be running."""
        self._num_genomes = num_genomes
        self._next = 0
        self._taken.clear()

    def take(self, label: str, num_engines: int, capacity: int) -> _Block:
        """Take genomes for an engine that is free.

        Args:
            label: the engine's.
            num_engines: number of engines, this one and busy ones included.
            capacity: most genomes of a block.
        """
        share = self._share(label, num_engines)
        if label not in self._speeds and num_engines > 1:
            share /= 2
        wanted = share * self._num_genomes - self._taken[label]
        if wanted <= 0:
            wanted = share * self.num_left
        count = min(max(math.ceil(wanted), 1), capacity, self.num_left)
        block = _Block(range(self._next, self._next + count), label, self._clock())
        self._next += count
        self._taken[label] += count
        return block

    def end(self, block: _Block) -> None:
        """Record that an engine has run a block, and is free."""
        took = max(self._clock() - block.began, 1e-9)
        self._speeds[block.label] = len(block.range_G) / took

    def _share(self, label: str, num_engines: int) -> float:
        """Return an engine's share of the speed of all; unknown speeds are the mean of others."""
        others = [speed for name, speed in self._speeds.items() if name != label]
        own = self._speeds.get(label) or (fmean(others) if others else 1.0)
        return own / (own + (num_engines - 1) * (fmean(others) if others else own))


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """How a generation shares engines with the next one.

    Attributes:
        centre: number of steps after which its genomes' centre is; engines may be further by now.
        all_taken: set when engines have taken all of its genomes, so that the next one may begin.
    """

    centre: int
    all_taken: anyio.Event = dataclasses.field(default_factory=anyio.Event)


_UnderWay: TypeAlias = tuple[asyncio.Task[_T | BaseException], Overlap]


@dataclasses.dataclass(eq=False)
class InOrder(Generic[_T]):
    """Attempts generations in order; the next one may begin while the last rollouts of one finish.

    A generation ends with its longest answer and its slowest tool, and every engine that is done
    before waits for it. With `max_staleness=1` such an engine begins the next generation instead,
    around the centre that there is: the step of the generation that is ending is not known yet. So
    genomes of generation g stand around the centre after g - 1 generations, not after g. Where they
    stand follows from the Config alone (`Config.centre_of`), never from who was done first: the
    history is the same on one engine and on many, and has it in every record.

    The order makes it exact. A generation's step is applied when engines have taken all genomes of
    the next generation; then the one after may begin. An
    evaluation measures the newest centre, so before one is due nothing begins ahead.

    Left out: beginning more than one generation ahead, and two centres on one engine. An engine
    that waits for a tool of the same block is not free; blocks of other engines do not wait for it.

    Attributes:
        attempt: attempts one, which may overlap with the next one.
        engine: takes the steps, once all genomes around the centre before them are loaded.
        num_generations: number of generations of the run.
        centre_of: around which centre a generation stands: its own, or the one before.
    """

    attempt: Callable[[int, Overlap], Awaitable[_T]]
    engine: Engine
    num_generations: int
    centre_of: Callable[[int], int]
    _under_way: "dict[int, _UnderWay[_T]]" = dataclasses.field(
        default_factory=dict[int, "_UnderWay[_T]"], init=False
    )

    async def __aenter__(self) -> "InOrder[_T]":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what is still running."""
        tasks = [task for task, _ in self._under_way.values()]
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def result(self, generation: int) -> _T:
        """Wait for the result of a generation; to be called in order.

        Raises:
            ESCookbookError: As the attempt.
        """
        task, _ = self._under_way.get(generation) or self.begin(generation)
        following = generation + 1
        if following < self.num_generations and self.centre_of(following) < following:
            await self._all_taken()
            self.begin(following)
        outcome = await task
        del self._under_way[generation]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def apply(self, step: Step) -> int:
        """Move the centre once all genomes around it are loaded. Returns its fingerprint."""
        await self._all_taken()
        async with self.engine.free():
            return await self.engine.apply(step)

    def begin(self, generation: int) -> _UnderWay[_T]:
        """Begin to attempt a generation."""
        overlap = Overlap(self.centre_of(generation))

        async def outcome() -> _T | BaseException:
            try:
                return await self.attempt(generation, overlap)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # A task that ends with Ctrl-C would break the loop.
                return error
            finally:
                overlap.all_taken.set()

        own = self._under_way[generation] = asyncio.create_task(outcome()), overlap
        return own

    async def _all_taken(self) -> None:
        """Wait until engines have taken all genomes under way."""
        for _, overlap in self._under_way.values():
            await overlap.all_taken.wait()
