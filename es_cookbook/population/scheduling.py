"""Which engine runs which genomes, and when: blocks of a generation, and generations that overlap.

    es-cookbook countdown max_staleness=1 engine=ray engine.num_engines=2

Which genomes an engine runs changes no rollout, so none of it is in a run's history.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

import anyio

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Step

_T = TypeVar("_T")
_TRUSTED = 0.25
"""An engine is as expected if its block took at most as much more or less, as a share."""
_MOST_FIXED = 0.8
"""Share of a block's time that is put down to no genome, at most: times are noisy."""


@dataclasses.dataclass(slots=True)
class _Engine:
    """What was seen of one engine.

    Attributes:
        each: seconds that a genome adds to a block.
        fixed: seconds of a block besides.
        size: genomes of its last block.
        took: seconds of that.
        is_steady: it was as expected.
    """

    each: float
    fixed: float
    size: int
    took: float
    is_steady: bool

    def seconds(self, num_genomes: int) -> float:
        return self.fixed + self.each * num_genomes

    def ran(self, size: int, took: float) -> "_Engine":
        """What is known after one more block."""
        expected = self.seconds(size)
        is_steady = abs(took - expected) <= _TRUSTED * expected
        fixed = self.fixed
        if size != self.size:  # Two points of a line; no part of it goes downwards.
            each = (took - self.took) / (size - self.size)
            fixed = min(max(took - each * size, 0.0), _MOST_FIXED * took)
        return _Engine((took - fixed) / size, fixed, size, took, is_steady)


@dataclasses.dataclass(eq=False, slots=True)
class _Block:
    """Genomes that an engine has taken, and when."""

    range_G: range
    label: str
    began: float


class BlockScheduler:
    """Hands out the genomes of generation after generation, so that unequal engines end together.

    No genome belongs to an engine before the engine takes it. A free engine takes the genomes that
    it could finish by the time at which all could end: busy engines until their blocks are expected
    to end, and then everybody at the speed that it had. A block takes some seconds however small it
    is (its longest answer, with little to batch), and so many more a genome; both are taken from
    the blocks that the engine last ran. An engine that kept to its expected time takes its whole
    share at once, which batches best. One whose speed is not known, or was not as expected, takes
    half, and what it leaves goes to whoever is free first; but not if half would take less than a
    block does anyway.

    Where generations overlap nobody has to end together, since whoever is free begins the next one.
    All shares are whole then: a block lasts at least as long as its longest answer, so many small
    blocks would be many tails.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._busy: dict[_Block, None] = {}
        self._num_genomes = 0
        self._next = 0
        self._is_whole = False

    @property
    def num_left(self) -> int:
        """Genomes that nobody has taken."""
        return self._num_genomes - self._next

    def begin(self, num_genomes: int, *, overlapping: bool = False) -> None:
        """Another generation; if they overlap, blocks of the one before may still be running."""
        self._num_genomes = num_genomes
        self._next = 0
        self._is_whole = overlapping

    def take(self, label: str, num_engines: int, capacity: int) -> _Block:
        """Genomes for an engine that is free.

        Args:
            label: the engine's.
            num_engines: that there are, this one and busy ones too.
            capacity: most genomes of a block.
        """
        now = self._clock()
        share = self._share(label, num_engines, now)
        engine = self._engines.get(label)
        is_whole = self._is_whole or num_engines == 1
        if engine is not None:
            is_whole |= engine.is_steady or engine.each * share / 2 < engine.fixed
        if not is_whole:
            share /= 2
        count = min(max(math.ceil(share), 1), capacity, self.num_left)
        block = _Block(range(self._next, self._next + count), label, now)
        self._next += count
        self._busy[block] = None
        return block

    def end(self, block: _Block) -> None:
        """An engine has run a block, and is free."""
        self._busy.pop(block, None)
        now = self._clock()
        size, took = len(block.range_G), max(now - block.began, 1e-9)
        engine = self._engines.get(block.label)
        first = _Engine(took / size, 0.0, size, took, is_steady=False)
        self._engines[block.label] = first if engine is None else engine.ran(size, took)

    def _share(self, label: str, num_engines: int, now: float) -> float:
        """How many of the genomes that are left an engine can finish until all could end."""
        known = self._engines
        count = max(len(known), 1)
        each = sum(e.each for e in known.values()) / count or 1.0
        typical = _Engine(each, sum(e.fixed for e in known.values()) / count, 1, 0.0, False)

        def of(label: str) -> _Engine:
            return known.get(label, typical)

        def ends(block: _Block) -> float:
            return max(now, block.began + of(block.label).seconds(len(block.range_G)))

        free = [(ends(block), of(block.label)) for block in self._busy]
        taken = {label, *(block.label for block in self._busy)}
        idle = [e for name, e in known.items() if name not in taken]
        num_idle = max(num_engines - len(free) - 1, 0)
        free += [(now, e) for e in (idle + [typical] * num_idle)[:num_idle]]
        # All could end at `until`: each engine adds its genomes from when its block has begun.
        own = of(label)
        rate, work = 1 / own.each, self.num_left + own.fixed / own.each
        until = now + work / rate
        for begins, engine in sorted((at + e.fixed, e.each) for at, e in free):
            if begins >= until:
                break
            work += (begins - now) / engine
            rate += 1 / engine
            until = now + work / rate
        return (until - now - own.fixed) / own.each


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """How a generation shares engines with the next one.

    Attributes:
        centre: its genomes stand around the centre after so many steps, from the base on, of which
            engines may have taken more by now.
        all_taken: is set when engines have taken all of its genomes: the next one may begin.
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

    The order is what makes it exact. A generation's step is applied when the next generation has no
    genome left that nobody has taken, by whoever is free; then the one after may begin. An
    evaluation measures the newest centre, so before one is due nothing begins ahead.

    Left out: beginning more than one generation ahead, and two centres on one engine. An engine
    that waits for a tool of its own block is not free; blocks of other engines do not wait for it.

    Attributes:
        attempt: attempts one, which may overlap with the next one.
        engine: takes the steps, when nobody needs the centre before them any more.
        num_generations: of the run.
        centre_of: around which centre a generation stands: its own, or the one before.
        take_held_back: has the engine take the step of the last recorded generation, where the
            first to come begins around the centre before it; None: the engine has it.
    """

    attempt: Callable[[int, Overlap], Awaitable[_T]]
    engine: Engine
    num_generations: int
    centre_of: Callable[[int], int]
    take_held_back: Callable[[], Awaitable[None]] | None = None
    _under_way: "dict[int, _UnderWay[_T]]" = dataclasses.field(
        default_factory=dict[int, "_UnderWay[_T]"], init=False
    )

    async def __aenter__(self) -> "InOrder[_T]":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel what nobody waits for any more."""
        tasks = [task for task, _ in self._under_way.values()]
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def of(self, generation: int) -> _T:
        """What came of a generation, once its rollouts have ended; asked for one after the other.

        Raises:
            ESCookbookError: As the attempt.
        """
        task, _ = self._under_way.get(generation) or self._begin(generation)
        if self.take_held_back is not None:
            async with self._centre_may_move():
                await self.take_held_back()
            self.take_held_back = None
        if self._begins_ahead(generation + 1):
            await self._all_taken()
            self._begin(generation + 1)
        outcome = await task
        del self._under_way[generation]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def apply(self, step: Step) -> int:
        """Move the centre, once nobody needs it as it was. Returns its fingerprint."""
        async with self._centre_may_move():
            return await self.engine.apply(step)

    def _begins_ahead(self, generation: int) -> bool:
        return generation < self.num_generations and self.centre_of(generation) < generation

    def _begin(self, generation: int) -> _UnderWay[_T]:
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
        """No genome is left of what is under way that no engine has taken."""
        for _, overlap in self._under_way.values():
            await overlap.all_taken.wait()

    @contextlib.asynccontextmanager
    async def _centre_may_move(self) -> AsyncGenerator[None]:
        """Inside, genomes that are still to be taken stand around the next centre."""
        await self._all_taken()
        async with self.engine.free():
            yield
