"""One problem while the population attempts it: make the Envs, run the attempts, score, close.

A group belongs to no engine. Its attempts come from all blocks of the population, in any order and
on any engine; the first makes the Envs, and the last has the group scored, while the block to which
it belongs is still resident, and closed.

The user's code is guarded here: what an Env or a group reward raises (`SystemExit` too), or does
not finish in time, is a `LostRollout`. What no other rollout would survive either goes through and
stops the run; so does a `KeyboardInterrupt`, which is the user's wish whoever raises it.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import TypeVar, cast

import anyio

from es_cookbook.common.errors import EngineError, EnvError, RequestError, leaves
from es_cookbook.engines.base import Engine
from es_cookbook.population.policy import Attempt, EnginePolicy, Residents
from es_cookbook.rl.rollouts import checked_group_rewards, run_rollout
from es_cookbook.rl.timeouts import Clock, Watch
from es_cookbook.rl.types import (
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NOT_RUN = LostRollout("never ran", "")
"""Holds the place of an attempt until it ends."""


class RolloutGroup:
    """The attempts of a population at one problem, from making its Envs to closing them.

    Args:
        builder: the problem.
        engine: answers where an Env asks the centre or the base.
        sampling: how policies sample, unless their Env asks otherwise.
        num_genomes: of the population.
        seeds_K: for each attempt, the sampling seed of its n-th call; the same for every genome.
        watch: stops what has control for too long.
        ended: is told of each attempt that has.
    """

    def __init__(
        self,
        builder: EnvGroupBuilder,
        engine: Engine,
        sampling: SamplingParams,
        num_genomes: int,
        seeds_K: Sequence[Callable[[int], int]],
        watch: Watch,
        ended: Callable[[Trajectory | LostRollout], None] | None = None,
    ) -> None:
        num_envs = num_genomes * len(seeds_K)
        self._builder = builder
        self._engine = engine
        self._sampling = sampling
        self._seeds_K = seeds_K
        self._watch = watch
        self._ended = ended
        self._handle: EnvGroup | None = None
        self._is_opening = False
        self._is_open = anyio.Event()
        self._num_left = num_envs
        self._policies: list[EnginePolicy | None] = [None] * num_envs
        self._trajectories: list[Trajectory | LostRollout] = [_NOT_RUN] * num_envs
        self._group_rewards: Sequence[GroupReward] | None = None

    def begin(self, block: Residents) -> list[asyncio.Task[BaseException | None]]:
        """A task for each attempt of a block's genomes.

        Plain tasks, not those of a task group: each would have a cancel scope beside its clock's.
        """
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[BaseException | None]] = []
        for g, target in zip(block.range_G, block.targets_G, strict=True):
            for k, seed_of_call in enumerate(self._seeds_K):
                clock = Clock(self._watch)
                attempt = Attempt(self._engine, self._sampling, block, seed_of_call, clock)
                run = self._attempt(EnginePolicy(attempt, target), g * len(self._seeds_K) + k)
                tasks.append(asyncio.Task(run, loop=loop, name="attempt"))
        return tasks

    async def _attempt(self, policy: EnginePolicy, i: int) -> BaseException | None:
        """Run one attempt; the first of the group makes the Envs, the last scores and closes.

        Returns what stops the run: raised, asyncio would print it where that ends by Ctrl-C.
        """
        try:
            if not self._is_open.is_set():
                await self._open()
            if self._handle is None or self._watch.is_stopping:  # Without Envs all are lost.
                return None
            self._policies[i] = policy
            async with _Guard(policy.attempt.clock) as guard:
                self._trajectories[i] = await run_rollout(self._handle.envs[i], policy)
            if guard.lost is not None:
                self._trajectories[i] = guard.lost
            if self._ended is not None:
                self._ended(self._trajectories[i])
            self._num_left -= 1
            if self._num_left == 0 and not self._watch.is_stopping:
                await self._score()
                await self.close()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._watch.stop()
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return error
        return None

    async def close(self) -> None:
        """Close the handle once, whatever is being cancelled around it."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        clock = Clock(self._watch, is_shielded=True)
        try:
            with clock:
                await handle.close()
        except (Exception, SystemExit, GeneratorExit):
            _logger.warning("closing a group of %s failed", self._name, exc_info=True)
        if clock.reason is not None:
            _logger.warning("closing a group of %s failed: %s", self._name, clock.reason)

    def result(self) -> TrajectoryGroup:
        """The group as an array of genomes x attempts."""
        given = self._group_rewards
        return TrajectoryGroup(
            self._by_genome(self._trajectories),
            None if given is None else self._by_genome(given),
            self._builder.tags,
        )

    def _by_genome(self, flat: Sequence[_T]) -> list[Sequence[_T]]:
        num_attempts = len(self._seeds_K)
        return [flat[i : i + num_attempts] for i in range(0, len(flat), num_attempts)]

    @property
    def _name(self) -> str:
        return type(self._builder).__qualname__

    async def _open(self) -> None:
        if self._is_opening:
            await self._is_open.wait()
            return
        self._is_opening = True
        try:
            async with _Guard(Clock(self._watch)) as guard:
                await self._make_envs()
            if guard.lost is not None:
                self._trajectories = [guard.lost] * len(self._trajectories)
                await self.close()
        finally:
            self._is_open.set()

    async def _make_envs(self) -> None:
        num_envs = len(self._trajectories)
        found = cast(object, await self._builder.make_envs(num_envs))
        if not isinstance(found, EnvGroup):
            raise EnvError(
                f"{self._name}.make_envs must give an EnvGroup, found {type(found).__name__}"
            )
        self._handle = found
        if len(found.envs) != num_envs:
            raise EnvError(
                f"{self._name}.make_envs must give {num_envs} Envs, found {len(found.envs)}"
            )

    async def _score(self) -> None:
        policies = [policy for policy in self._policies if policy is not None]
        rewards: Sequence[GroupReward | LostRollout] | None = None
        clock = Clock(self._watch)
        for policy in policies:
            policy.attempt.clock = clock
        async with _Guard(clock) as guard:
            found = await self._builder.compute_group_rewards(self._trajectories, policies)
            rewards = checked_group_rewards(self._name, found, self._trajectories)
        if guard.lost is not None:
            self._trajectories = [guard.lost] * len(self._trajectories)
        elif rewards is not None:
            self._group_rewards = [self._kept(i, given) for i, given in enumerate(rewards)]

    def _kept(self, i: int, given: GroupReward | LostRollout) -> GroupReward:
        """A group reward; where the group lost the rollout, none, and the rollout is lost."""
        if isinstance(given, GroupReward):
            return given
        self._trajectories[i] = given
        return GroupReward(0.0)


@contextlib.asynccontextmanager
async def running(groups_P: Sequence[RolloutGroup], watch: Watch) -> AsyncGenerator[None]:
    """Inside, attempts at these problems run; in the end all groups are closed.

    Task groups wrap whatever stops them; what is raised is the one error that the user should read.
    """
    try:
        with watch:
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as closing:
                        for group in groups_P:
                            closing.start_soon(group.close)
    except BaseExceptionGroup as errors:
        cause = _what_stops(errors) or next(leaves(errors))
        raise (cause.args[0] if isinstance(cause, _CtrlC) else cause) from None


async def finished(tasks: Sequence[asyncio.Task[BaseException | None]], watch: Watch) -> None:
    """Wait for all of these attempts, and for the scores of the groups that they complete."""
    try:
        errors = await _ended(tasks)
    except asyncio.CancelledError:
        watch.stop()
        with anyio.CancelScope(shield=True):
            await _ended(tasks)
        raise
    if errors:
        raise BaseExceptionGroup("attempts that stop the run", errors)


async def _ended(tasks: Sequence[asyncio.Task[BaseException | None]]) -> list[BaseException]:
    """Wait for all. The last first: by then most have ended, and cost no call of their own."""
    for task in reversed(tasks):
        if not task.done():
            await asyncio.wait((task,))
    return [e for task in tasks if not task.cancelled() and (e := task.result()) is not None]


class _Guard:
    """Inside, the user's code has control: what it raises is `lost`; what stops the run goes on.

    Around all that a task does, which the clock cancels and nobody else.
    """

    __slots__ = ("_clock", "lost")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.lost: LostRollout | None = None

    async def __aenter__(self) -> "_Guard":
        self._clock.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        task, clock = asyncio.current_task(), self._clock
        assert task is not None
        if error is None and task.cancelling():  # By itself, or by us just now.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as cancelled:
                error = cancelled
        if error is None:
            clock.__exit__(None, None, None)
            if clock.interrupted is not None:
                self.lost = LostRollout(clock.reason or "", "")
        elif clock.__exit__(type(error), error, error.__traceback__):
            self.lost = LostRollout(clock.reason or "", clock.overdue_at or "")
        elif isinstance(error, asyncio.CancelledError):
            if clock.is_stopping:
                raise error
            # Nobody cancelled us: the user's code awaited something that was cancelled, or
            # cancelled its own task.
            while task.uncancel():
                pass
            self.lost = _lost(error)
        else:
            if (stop := _what_stops(error)) is not None:
                raise stop from None
            self.lost = _lost(error)
            if clock.interrupted is not None:
                self.lost = LostRollout(clock.reason or "", self.lost.traceback)
        return True


def _lost(error: BaseException) -> LostRollout:
    first_line = str(error).partition("\n")[0]
    return LostRollout(
        f"{type(error).__name__}: {first_line}".removesuffix(": "),
        "".join(traceback.format_exception(error)),
    )


class _CtrlC(BaseException):
    """Carries a `KeyboardInterrupt` through task groups; bare, it would break the event loop."""


def _what_stops(error: BaseException) -> BaseException | None:
    """What no other rollout would survive either, if it is in there."""
    for each in leaves(error):
        if isinstance(each, KeyboardInterrupt):
            return _CtrlC(each)
        if isinstance(each, RequestError | EngineError | _CtrlC):
            return each
    return None
