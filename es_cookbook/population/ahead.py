"""Generations that overlap: the next one begins while the last rollouts of one finish.

    es-cookbook countdown max_staleness=1 engine=ray engine.num_engines=2

A generation ends with its longest answer and its slowest tool, and every engine that is done before
waits for it. With `max_staleness=1` such an engine begins the next generation instead, around the
centre that there is: the step of the generation that is ending is not known yet. So genomes of
generation g stand around the centre after g - 1 generations, not after g. Where they stand follows
from the Config alone (`Config.centre_of`), never from who was done first: the history is the same
on one engine and on many, and has it in every record.

The order is what makes it exact. A generation's step is applied when the next generation has no
genome left that nobody has taken, by whoever is free; then the one after may begin. An evaluation
measures the newest centre, so before one is due nothing begins ahead.

Left out: beginning more than one generation ahead, and two centres on one engine. An engine that
waits for a tool of its own block is not free; blocks of other engines do not wait for it.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

import anyio

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Step
from es_cookbook.population.sampler import Overlap

_T = TypeVar("_T")
_UnderWay: TypeAlias = tuple[asyncio.Task[_T | BaseException], Overlap | None]


@dataclasses.dataclass(eq=False)
class InOrder(Generic[_T]):
    """Attempts generations in order, the next one ahead of time where it may begin.

    Attributes:
        attempt: attempts one, which may overlap with the next one.
        engine: takes the steps, when nobody needs the centre before them any more.
        num_generations: of the run.
        centre_of: around which centre a generation stands; None: each around its own, and none
            begins ahead.
        take_held_back: has the engine take the step of the last recorded generation, where the
            first to come begins around the centre before it; None: the engine has it.
    """

    attempt: Callable[[int, Overlap | None], Awaitable[_T]]
    engine: Engine
    num_generations: int
    centre_of: Callable[[int], int] | None = None
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
        if self.centre_of is None or generation >= self.num_generations:
            return False
        return self.centre_of(generation) < generation

    def _begin(self, generation: int) -> _UnderWay[_T]:
        overlap = None if self.centre_of is None else Overlap(self.centre_of(generation))

        async def outcome() -> _T | BaseException:
            try:
                return await self.attempt(generation, overlap)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # A task that ends with Ctrl-C would break the loop.
                return error
            finally:
                if overlap is not None:
                    overlap.all_taken.set()

        own = self._under_way[generation] = asyncio.create_task(outcome()), overlap
        return own

    async def _all_taken(self) -> None:
        """No genome is left of what is under way that no engine has taken."""
        for _, overlap in self._under_way.values():
            if overlap is not None:
                await overlap.all_taken.wait()

    @contextlib.asynccontextmanager
    async def _centre_may_move(self) -> AsyncGenerator[None]:
        """Inside, genomes that are still to be taken stand around the next centre."""
        await self._all_taken()
        async with self.engine.free():
            yield
