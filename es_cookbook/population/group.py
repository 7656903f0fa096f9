"""One problem while the population attempts it: make the Envs, run the attempts, score, close.

A group belongs to no engine. Its attempts come from all blocks of the population, in any order and
on any engine; the first makes the Envs, and the last has the group scored, while the block to which
it belongs is still resident, and closed.

The user's code is guarded here: what an Env or a group reward raises (`SystemExit` too), or does
not finish in time, is a `LostRollout`. What no other rollout would survive either goes through and
stops the run; so does a `KeyboardInterrupt`, which is the user's wish whoever raises it.
"""

import asyncio
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
    """

    def __init__(
        self,
        builder: EnvGroupBuilder,
        engine: Engine,
        sampling: SamplingParams,
        num_genomes: int,
        seeds_K: Sequence[Callable[[int], int]],
        watch: Watch,
    ) -> None:
        num_envs = num_genomes * len(seeds_K)
        self._builder = builder
        self._engine = engine
        self._sampling = sampling
        self._seeds_K = seeds_K
        self._watch = watch
        self._handle: EnvGroup | None = None
        self._is_opening = False
        self._is_open = anyio.Event()
        self._num_left = num_envs
        self._policies: list[EnginePolicy | None] = [None] * num_envs
        self._trajectories: list[Trajectory | LostRollout] = [_NOT_RUN] * num_envs
        self._group_rewards: Sequence[GroupReward] | None = None

    def policies(self, block: Residents) -> Iterator[tuple[EnginePolicy, int]]:
        """A policy for each of a block's attempts, and the attempt's index."""
        for g, target in zip(block.range_G, block.targets_G, strict=True):
            for k, seed_of_call in enumerate(self._seeds_K):
                clock = Clock(self._watch)
                attempt = Attempt(self._engine, self._sampling, block, seed_of_call, clock)
                yield EnginePolicy(attempt, target), g * len(self._seeds_K) + k

    async def attempt(self, policy: EnginePolicy, i: int) -> None:
        """Run one attempt; the first of the group makes the Envs, the last scores and closes."""
        if not self._is_open.is_set():
            await self._open()
        if self._handle is None or self._watch.is_stopping:  # Without Envs all are lost.
            return
        self._policies[i] = policy
        run = functools.partial(run_rollout, self._handle.envs[i], policy)
        self._trajectories[i] = await self._guarded(policy.attempt.clock, run)
        self._num_left -= 1
        if self._num_left == 0 and not self._watch.is_stopping:
            await self._score()
            await self.close()

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
        trajectories_G_K = self._by_genome(self._trajectories)
        rewards = metrics = logs = None
        if self._group_rewards is not None:
            rewards = self._by_genome([given.reward for given in self._group_rewards])
            metrics = self._by_genome([given.metrics for given in self._group_rewards])
            logs = self._by_genome([given.logs for given in self._group_rewards])
        return TrajectoryGroup(trajectories_G_K, rewards, metrics, logs, self._builder.tags)

    def _by_genome(self, flat: Sequence[_T]) -> list[Sequence[_T]]:
        num_attempts = len(self._seeds_K)
        return [flat[i : i + num_attempts] for i in range(0, len(flat), num_attempts)]

    @property
    def _name(self) -> str:
        return type(self._builder).__qualname__

    def _lose_all(self, lost: LostRollout) -> None:
        self._trajectories = [lost] * len(self._trajectories)

    async def _open(self) -> None:
        if self._is_opening:
            await self._is_open.wait()
            return
        self._is_opening = True
        try:
            lost = await self._guarded(Clock(self._watch), self._make_envs)
            if isinstance(lost, LostRollout):
                self._lose_all(lost)
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
        clock = Clock(self._watch)
        for policy in policies:
            policy.attempt.clock = clock
        rewards = await self._guarded(clock, lambda: self._compute_group_rewards(policies))
        if isinstance(rewards, LostRollout):
            self._lose_all(rewards)
        elif rewards is not None:
            self._group_rewards = [self._kept(i, given) for i, given in enumerate(rewards)]

    def _kept(self, i: int, given: GroupReward | LostRollout) -> GroupReward:
        """A group reward; where the group lost the rollout, none, and the rollout is lost."""
        if isinstance(given, GroupReward):
            return given
        self._trajectories[i] = given
        return GroupReward(0.0)

    async def _compute_group_rewards(
        self, policies: Sequence[EnginePolicy]
    ) -> Sequence[GroupReward | LostRollout] | None:
        found = await self._builder.compute_group_rewards(self._trajectories, policies)
        return checked_group_rewards(self._name, found, self._trajectories)

    async def _guarded(self, clock: Clock, call: Callable[[], Awaitable[_T]]) -> _T | LostRollout:
        """What the user's code returns, or how it was lost; what stops the run goes through.

        Runs in a task of its own, which the clock cancels and nobody else.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            with clock:
                result = await call()
                if task.cancelling():  # By itself, or by us just now.
                    await asyncio.sleep(0)
                if clock.interrupted is None:
                    return result
            trace = clock.overdue_at or ""
        except anyio.get_cancelled_exc_class() as error:
            if clock.is_stopping:
                raise
            # Nobody cancelled us: the user's code awaited something that was cancelled, or
            # cancelled its own task.
            while task.uncancel():
                pass
            return _lost(error)
        except BaseException as error:
            stop = _what_stops(error)
            if stop is not None:
                raise stop from None
            if clock.interrupted is None:
                return _lost(error)
            trace = _lost(error).traceback
        return LostRollout(clock.reason or "", trace)


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


def cause_of(errors: BaseException) -> BaseException:
    """The one error that the user should read, out of a group of them."""
    cause = _what_stops(errors) or next(leaves(errors))
    return cause.args[0] if isinstance(cause, _CtrlC) else cause
