"""Who is in a pool: engines join, are lent, agree with each other, and are lost.

The one rule is that an engine counts only while its centre is the pool's. A new one starts in the
background, takes the steps that were made meanwhile, and is let in when its fingerprint is that of
the others; after every step all fingerprints are compared, and an engine that differs from most is
restored.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import TypeVar, cast

from es_cookbook.common.errors import ConfigError, EngineError, ESCookbookError
from es_cookbook.engines.ray.cluster import Place
from es_cookbook.engines.ray.member import (
    DisagreementError,
    EngineLostError,
    Ledger,
    Member,
    PoolSettings,
)

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CHECKS_PER_TIMEOUT = 8
_PATIENCE = 10.0
"""Seconds after which the user is told what is waited for."""


class Roster:
    """The engines of a pool. Empty until `add`.

    Args:
        settings: how engines are made.
        ledger: where they should be.
        strategy: how engines are placed that are added together.
        most: engines up to which more join by themselves while the cluster has room.

    Attributes:
        members: engines that are there now.
    """

    def __init__(self, settings: PoolSettings, ledger: Ledger, strategy: str, most: int) -> None:
        self.members: list[Member] = []
        self._settings = settings
        self._ledger = ledger
        self._strategy = strategy
        self._most = most
        self._joining: set[Member] = set()
        self._num_started = 0
        self._free: asyncio.Queue[Member | None] = asyncio.Queue()
        self._vacant: list[Place] = []
        self._last_loss: EngineError | None = None
        self._is_closed = False
        self._moving = asyncio.Lock()
        self._reserving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = {asyncio.create_task(self._watch())}

    async def add(self, count: int) -> None:
        """Have more engines join, and wait until they are there.

        Raises:
            ConfigError: The cluster has no room for them within `start_timeout`.
            ESCookbookError: One of them cannot be built, or disagrees with the others.
        """
        settings = self._settings
        reserving = asyncio.create_task(
            settings.cluster.reserve(count, settings.needs, self._strategy)
        )
        try:
            async with asyncio.timeout(settings.start_timeout):
                done, _ = await asyncio.wait({reserving}, timeout=_PATIENCE)
                if not done:
                    _logger.warning("waiting for %s", self._shortage(count))
                places = await reserving
        except TimeoutError:
            raise ConfigError(
                f"within engine.start_timeout={settings.start_timeout:g} s there was no "
                f"{self._shortage(count)}"
            ) from None
        finally:
            reserving.cancel()
        try:
            await self._join(places)
        except BaseException:
            settings.cluster.release(places)
            raise

    async def borrow(self) -> Member:
        """The next engine that is free.

        Raises:
            EngineError: None is left.
        """
        while self.members:
            member = await self._free.get()
            if member is not None and member.lost is None:
                return member
        self._free.put_nowait(None)  # Wakes the next who waits.
        raise self._none_left()

    def give_back(self, member: Member) -> None:
        """An engine that was borrowed is free again."""
        if member.lost is None:
            self._free.put_nowait(member)

    def least_busy(self) -> Member:
        """The engine with the fewest requests.

        Raises:
            EngineError: None is left.
        """
        if not self.members:
            raise self._none_left()
        return min(self.members, key=lambda member: member.mailbox.num_unanswered)

    async def apply(self, step: bytes) -> int:
        """Have all engines take a step. Returns the fingerprint on which they agree.

        Raises:
            DisagreementError: One differs from the others after it was restored, too.
            EngineError: None is left.
        """
        async with self._moving:
            self._ledger.steps.append(step)
            return await self._move(Member.catch_up)

    async def restore(self, steps: Sequence[bytes], snapshot: str | None) -> int:
        """Set all engines to the base moved by these steps; returns and raises as `apply`."""
        async with self._moving:
            self._ledger.steps = list(steps)
            self._ledger.snapshot = snapshot
            return await self._move(Member.restore)

    async def close(self) -> None:
        """End all engines; requests in flight fail. Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        members, self.members = [*self.members, *self._joining], []
        await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
        self._free.put_nowait(None)
        await self._settings.cluster.close()

    def _shortage(self, count: int) -> str:
        needs, there = self._settings.needs, self._settings.cluster.resources()
        return (
            f"room on the Ray cluster for {count} engines with CPU {needs.num_cpus:g} and "
            f"GPU {needs.num_gpus:g} each; it has CPU {there.get('CPU', 0):g} and "
            f"GPU {there.get('GPU', 0):g} in all"
        )

    async def _join(self, places: Sequence[Place]) -> None:
        """Start engines, and let them in once they are where the others are."""
        numbers = range(self._num_started, self._num_started + len(places))
        self._num_started += len(places)
        members = [
            Member(number, place, self._settings, self._ledger, self._lose)
            for number, place in zip(numbers, places, strict=True)
        ]
        self._joining |= set(members)
        try:
            await _all([member.start() for member in members])
            async with self._moving:
                found = await _all([member.catch_up() for member in members])
                await self._agree(dict(zip(members, found, strict=True)))
                for member in members:
                    if member.lost is not None:
                        raise member.lost
        except BaseException:
            await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
            raise
        finally:
            self._joining -= set(members)
        self.members += members
        for member in members:
            self._free.put_nowait(member)

    def _fill_up(self) -> None:
        """Begin to start engines where some are missing, and to wait for room where more may be."""
        places, self._vacant = self._vacant, []
        for place in places:
            self._spawn(self._join_later(place))
        if self._reserving is None or self._reserving.done():
            self._reserving = self._spawn(self._reserve_later())

    async def _reserve_later(self) -> None:
        """One after the other, while there may be more and they are able to join."""
        settings = self._settings
        able = True
        while able and len(self.members) + len(self._joining) < self._most:
            (place,) = await settings.cluster.reserve(1, settings.needs, self._strategy)
            able = await self._join_later(place)

    async def _join_later(self, place: Place) -> bool:
        try:
            await self._join([place])
        except ESCookbookError as error:
            _logger.warning("an engine could not join the pool: %s", error)
            self._vacant.append(place)  # Tried again after the next step.
            return False
        return True

    def _spawn(self, work: Coroutine[None, None, _T]) -> "asyncio.Task[_T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.request_timeout / _CHECKS_PER_TIMEOUT)
            for member in self.members:
                member.mailbox.check_progress()

    async def _move(self, move: Callable[[Member], Awaitable[int]]) -> int:
        self._ledger.fingerprint = None
        members = list(self.members)
        outcomes = await asyncio.gather(*map(move, members), return_exceptions=True)
        found: dict[Member, int] = {}
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, int):
                found[member] = outcome
            elif not isinstance(outcome, EngineLostError):
                raise outcome
        await self._agree(found)
        if self._ledger.fingerprint is None:
            raise self._none_left()
        self._fill_up()
        return self._ledger.fingerprint

    async def _agree(self, found: dict[Member, int]) -> None:
        """Restore engines that differ from the others; all have one fingerprint afterwards."""
        expected = self._ledger.fingerprint
        if expected is None:
            expected = _of_most(found.values())
        for member, fingerprint in list(found.items()):
            if fingerprint != expected:
                _logger.warning(
                    "engine %d of the pool has fingerprint %016x, %s; it is restored",
                    *(member.number, fingerprint),
                    "engines disagree" if expected is None else f"the others {expected:016x}",
                )
                del found[member]
                with suppress(EngineLostError):
                    found[member] = await member.restore(from_base=True)
        if expected is None:
            expected = next(iter(found.values()), None)
        for member, fingerprint in found.items():
            if fingerprint != expected:
                raise DisagreementError.of(member.number, fingerprint, cast(int, expected))
        self._ledger.fingerprint = expected

    def _lose(self, member: Member) -> None:
        """Told by an engine that is lost."""
        self._last_loss = member.lost
        if member in self.members:
            self.members.remove(member)
            self._vacant.append(member.place)
            _logger.warning("%s; engines left: %d", member.lost, len(self.members))
            if not self.members:
                self._free.put_nowait(None)

    def _none_left(self) -> EngineError:
        if self._is_closed:
            return EngineError("the engine is closed")
        return EngineError(
            f"no engine of the pool is left ({self._last_loss}); what a run has recorded stays, "
            "and it can be resumed"
        )


async def _all(calls: Sequence[Awaitable[_T]]) -> list[_T]:
    """What they give once all have ended, or the first error that one raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)


def _of_most(fingerprints: Collection[int]) -> int | None:
    """The one that more than half of the engines have, if there is one."""
    for fingerprint, votes in Counter(fingerprints).most_common(1):
        if 2 * votes > len(fingerprints):
            return fingerprint
    return None
