"""Who runs what, when: every genome attempts every problem, concurrently, on one engine.

Genomes go to the engine in blocks of its capacity. Within a block all rollouts are tasks of their
own, so slow graders, judges and long answers do not hold anybody up, and the engine always has
something to batch. A group (one problem, all genomes) is closed as soon as it ends, also when the
run is cancelled.

The one idea is common random numbers: the sampling seed is a function of (run seed, generation,
problem, attempt, turn) and not of the genome, so that genomes differ by what they are and not by
their luck.

What fails: an Env's exception or time-out loses its own rollout (NaN, counted); a request that no
engine could serve is the user's mistake and stops the run with its sentence; so does an engine that
failed. The time-out counts only the time for which the Env has had control, waiting for the engine
left out: a large population is slow, not hung.

Left out: retrying a lost rollout. The generation goes on without it, and the next one is fresh
anyway.
"""

import dataclasses
import functools
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar, cast

import anyio

from es_cookbook.engines.base import Engine
from es_cookbook.engines.policy import Attempt, EnginePolicy, Residents
from es_cookbook.errors import EngineError, EnvError, RequestError, TooManyLostError
from es_cookbook.evolution.genome import Genome
from es_cookbook.rl.rollouts import checked_group_rewards, lost_rollouts, run_rollout
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
from es_cookbook.seeds import derive_seed

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NOT_RUN = LostRollout("never ran", "")
"""Holds the place of an attempt until it ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """Where the last call's time went.

    Attributes:
        load: making genomes resident.
        sample: all the rest of the rollouts, from making the Envs to closing them.
        score: the part of `sample` in which at least one Env or group reward had control.
    """

    load: float = 0.0
    sample: float = 0.0
    score: float = 0.0


class PopulationSampler:
    """Runs genomes against problems on one engine.

    Args:
        engine: holds the model; this sampler decides which genomes are resident.
        sampling: how every policy samples, unless its Env asks otherwise.
        attempts: K, rollouts of one genome at one problem.
        rollout_timeout: seconds for which one rollout's Env may have control, and a group be made,
            scored or closed.
        max_failed_fraction: stop when more than this fraction of a generation's rollouts is lost.
        run_seed: the run's seed, from which sampling seeds are derived.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: SamplingParams,
        attempts: int = 1,
        rollout_timeout: float = 600.0,
        max_failed_fraction: float = 0.1,
        run_seed: int = 0,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.attempts = attempts
        self.rollout_timeout = rollout_timeout
        self.max_failed_fraction = max_failed_fraction
        self.run_seed = run_seed
        self.seconds = Seconds()

    async def rollout(
        self,
        generation: int,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        genomes_G: Sequence[Genome],
    ) -> list[TrajectoryGroup]:
        """Every genome's K attempts at every problem; one group a problem.

        Raises:
            TooManyLostError: More than `max_failed_fraction` of the rollouts were lost.
            RequestError: A request that the engine can never serve.
            EngineError: The engine failed.
        """
        capacity = self.engine.capacity
        blocks = [
            Residents(
                range(len(genomes_G))[first : first + capacity], genomes_G[first : first + capacity]
            )
            for first in range(0, len(genomes_G), capacity)
        ]
        return await self._run(
            f"generation {generation}",
            env_group_builders_P,
            blocks,
            self.sampling,
            self.attempts,
            functools.partial(derive_seed, self.run_seed, "sampling", generation),
        )

    async def rollout_centre(
        self, env_group_builders_P: Sequence[EnvGroupBuilder], sampling: SamplingParams
    ) -> list[TrajectoryGroup]:
        """One attempt of the centre at every problem; the resident genomes stay.

        Raises:
            TooManyLostError: More than `max_failed_fraction` of the rollouts were lost.
            RequestError: A request that the engine can never serve.
            EngineError: The engine failed.
        """
        return await self._run(
            "an evaluation",
            env_group_builders_P,
            [Residents(range(1))],
            sampling,
            1,
            functools.partial(derive_seed, self.run_seed, "evaluation"),
        )

    async def _run(
        self,
        what: str,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        blocks: Sequence[Residents],
        sampling: SamplingParams,
        num_attempts: int,
        seed_of: Callable[[int, int, int], int],
    ) -> list[TrajectoryGroup]:
        began = time.perf_counter()
        load_seconds = 0.0
        watch = Watch(self.rollout_timeout)
        num_genomes = blocks[-1].range_G.stop
        groups_P = [
            _Group(
                builder,
                self.engine,
                sampling,
                num_genomes,
                # The same functions for every genome: common random numbers. Cached: each seed is
                # derived once.
                [functools.cache(functools.partial(seed_of, p, k)) for k in range(num_attempts)],
                watch,
            )
            for p, builder in enumerate(env_group_builders_P)
        ]
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(watch.run)
                for block in blocks:
                    if block.genomes_G is not None:
                        loading = time.perf_counter()
                        await self.engine.load(block.genomes_G)
                        load_seconds += time.perf_counter() - loading
                    block.are_resident = True
                    async with anyio.create_task_group() as running:
                        for group in groups_P:
                            running.start_soon(group.run, block, block is blocks[-1])
                    block.are_resident = False
                watching.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            # Task groups wrap whatever stops them; the user reads the one sentence inside.
            raise _cause(errors) from None
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for group in groups_P:
                        closing.start_soon(group.close)
        self.seconds = Seconds(
            load_seconds, time.perf_counter() - began - load_seconds, watch.seconds
        )
        trajectory_groups_P = [group.result() for group in groups_P]
        self._check_lost(what, trajectory_groups_P, len(groups_P) * num_genomes * num_attempts)
        return trajectory_groups_P

    def _check_lost(
        self, what: str, groups_P: Sequence[TrajectoryGroup], num_rollouts: int
    ) -> None:
        lost = lost_rollouts(groups_P)
        if len(lost) > self.max_failed_fraction * num_rollouts:
            first = lost[0]
            raise TooManyLostError(
                f"{len(lost)} of the {num_rollouts} rollouts of {what} were lost, more than "
                f"max_failed_fraction={self.max_failed_fraction:g} allows; the first: "
                f"{first.reason}\n{first.traceback}".rstrip()
            )


class _Group:
    """One problem while it runs: from `make_envs` in the first block to `close` after the last."""

    def __init__(
        self,
        builder: EnvGroupBuilder,
        engine: Engine,
        sampling: SamplingParams,
        num_genomes: int,
        seeds_K: Sequence[Callable[[int], int]],
        watch: Watch,
    ) -> None:
        self._builder = builder
        self._engine = engine
        self._sampling = sampling
        self._num_genomes = num_genomes
        self._seeds_K = seeds_K
        self._watch = watch
        self._handle: EnvGroup | None = None
        self._policies: list[EnginePolicy] = []
        self._trajectories: list[Trajectory | LostRollout] = [_NOT_RUN] * self._num_envs
        self._group_rewards: Sequence[GroupReward] | None = None

    @property
    def _num_envs(self) -> int:
        return self._num_genomes * len(self._seeds_K)

    async def run(self, block: Residents, is_last: bool) -> None:
        """Run this block's attempts; the first makes the Envs, the last scores and closes."""
        if block.range_G.start == 0:
            lost = await self._guarded(Clock(self._watch), self._make_envs)
            if isinstance(lost, LostRollout):
                self._lose_all(lost)
                await self.close()
        if self._handle is None:
            return
        async with anyio.create_task_group() as attempts:
            for g, target in zip(block.range_G, block.targets_G, strict=True):
                for k, seed_of_call in enumerate(self._seeds_K):
                    clock = Clock(self._watch)
                    attempt = Attempt(self._engine, self._sampling, block, seed_of_call, clock)
                    self._policies.append(EnginePolicy(attempt, target))
                    attempts.start_soon(self._attempt, g * len(self._seeds_K) + k)
        if is_last:
            await self._score()
            await self.close()

    async def close(self) -> None:
        """Close the handle once, whatever is being cancelled around it."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with anyio.move_on_after(self._watch.timeout, shield=True) as scope:
            try:
                await handle.close()
            except Exception:
                _logger.warning("closing a group of %s failed", self._name, exc_info=True)
        if scope.cancelled_caught:
            _logger.warning("closing a group of %s hung; left behind", self._name)

    def result(self) -> TrajectoryGroup:
        """The group as an array of genomes x attempts."""
        trajectories_G_K = self._by_genome(self._trajectories)
        tags = self._builder.tags
        if self._group_rewards is None:
            return TrajectoryGroup(trajectories_G_K, tags=tags)
        return TrajectoryGroup(
            trajectories_G_K,
            self._by_genome([given.reward for given in self._group_rewards]),
            self._by_genome([given.metrics for given in self._group_rewards]),
            tags,
        )

    def _by_genome(self, flat: Sequence[_T]) -> list[Sequence[_T]]:
        num_attempts = len(self._seeds_K)
        return [flat[i : i + num_attempts] for i in range(0, len(flat), num_attempts)]

    @property
    def _name(self) -> str:
        return type(self._builder).__qualname__

    def _lose_all(self, lost: LostRollout) -> None:
        self._trajectories = [lost] * self._num_envs

    async def _make_envs(self) -> None:
        found = cast(object, await self._builder.make_envs(self._num_envs))
        if not isinstance(found, EnvGroup):
            raise EnvError(
                f"{self._name}.make_envs must give an EnvGroup, found {type(found).__name__}"
            )
        self._handle = found
        if len(found.envs) != self._num_envs:
            raise EnvError(
                f"{self._name}.make_envs must give {self._num_envs} Envs, found {len(found.envs)}"
            )

    async def _attempt(self, i: int) -> None:
        assert self._handle is not None
        policy = self._policies[i]
        run = functools.partial(run_rollout, self._handle.envs[i], policy)
        self._trajectories[i] = await self._guarded(policy.attempt.clock, run)

    async def _score(self) -> None:
        clock = Clock(self._watch)
        for policy in self._policies:
            policy.attempt.clock = clock
        rewards = await self._guarded(clock, self._compute_group_rewards)
        if isinstance(rewards, LostRollout):
            self._lose_all(rewards)
        else:
            self._group_rewards = rewards

    async def _compute_group_rewards(self) -> Sequence[GroupReward] | None:
        found = await self._builder.compute_group_rewards(self._trajectories, self._policies)
        return checked_group_rewards(self._name, found, self._trajectories)

    async def _guarded(self, clock: Clock, call: Callable[[], Awaitable[_T]]) -> _T | LostRollout:
        """What the user's code gives, or how it was lost; what stops the run goes through."""
        try:
            with clock:
                return await call()
        except anyio.get_cancelled_exc_class() as error:
            if anyio.get_current_task().has_pending_cancellation():
                raise
            # Nobody cancelled us: the user's code awaited something that was cancelled.
            return _lost(error)
        except Exception as error:
            stop = _stopping(error)
            if stop is not None:
                raise stop from None
            return _lost(error)
        reason = f"TimeoutError: not done after {self._watch.timeout:g} s (rollout_timeout)"
        return LostRollout(reason, clock.overdue_at or "")


def _lost(error: BaseException) -> LostRollout:
    first_line = str(error).partition("\n")[0]
    return LostRollout(
        f"{type(error).__name__}: {first_line}".removesuffix(": "),
        "".join(traceback.format_exception(error)),
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _stopping(error: BaseException) -> RequestError | EngineError | None:
    """What no other rollout would survive either, if it is in there."""
    return next((e for e in _leaves(error) if isinstance(e, RequestError | EngineError)), None)


def _cause(errors: BaseException) -> BaseException:
    return _stopping(errors) or next(_leaves(errors))
