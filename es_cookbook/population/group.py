"""One problem while the population attempts it: make the Envs, run the attempts, score, close.

A group belongs to no engine. Its attempts come from all blocks of the population, in any order and
on any engine; the first makes the Envs, and the last has the group scored, while the block to which
it belongs is still resident, and closed.

An Env sees the engine as a `Policy`: one genome, the centre or the base. An attempt's policies
share its sampling seeds and its clock. The n-th call has the n-th seed, whichever of them makes it,
so an Env that asks four times gets four samples; and the clock stands still while the engine has
control, so only the Env's own time counts towards its time-out.

The user's code is guarded here: what an Env or a group reward raises (`SystemExit` too), or does
not finish in time, is a `LostRollout`. Errors that no other rollout would survive, and a
`KeyboardInterrupt`, stop the run.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar, cast

import anyio
import chz

from es_cookbook.common.errors import EngineError, EnvError, RequestError, leaves, with_class
from es_cookbook.engines.base import Engine, Host, LogprobsRequest, SampleRequest, Target
from es_cookbook.rl.rollouts import checked_group_rewards, run_rollout
from es_cookbook.rl.timeouts import Clock, Watch
from es_cookbook.rl.types import (
    Action,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NOT_RUN = LostRollout("never ran", "")
"""Placeholder of an attempt until it ends."""


@dataclasses.dataclass(slots=True)
class ResidentBlock:
    """A block of the population that one host has together.

    Attributes:
        range_G: indices of the genomes in the population.
        targets_G: targets that name them in requests.
        host: their host; None before they are loaded and once it is given back.
        has_own_centre: engines may meanwhile have another centre than that of these genomes.
    """

    range_G: range
    targets_G: Sequence[Target]
    host: Host | None = None
    has_own_centre: bool = False


@dataclasses.dataclass(slots=True)
class Attempt:
    """State shared by the policies of one attempt (its genome's, the centre's and the base's).

    `sampling` holds where an Env gives none; `clock` stands still while the engine has control.
    """

    engine: Engine
    sampling: SamplingParams
    block: ResidentBlock
    seed_of_call: Callable[[int], int]
    clock: Clock
    num_calls: int = 0

    def answering(self, target: Target) -> Host:
        """Return the host that answers for a target.

        Raises:
            RequestError: The genome's host has gone on to others, or to the next generation.
        """
        if target == "centre" and self.block.has_own_centre:
            if self.block.host is None:
                raise RequestError(
                    "the centre was asked after the engine had gone on to other genomes, and may "
                    "have moved: group rewards that ask it need max_staleness=0"
                )
            return self.block.host
        if not isinstance(target, int):
            return self.engine
        if self.block.host is None:
            fits = "that fits" if self.engine.num_engines == 1 else "that fits on one engine"
            raise RequestError(
                f"genome {self.block.range_G[target]} was asked after the engine had gone on "
                f"to others; it hosts {self.engine.traits.capacity} at a time, so group rewards "
                f"that ask genomes need a population {fits} (policy.centre and policy.base are "
                "always there)"
            )
        return self.block.host


class EnginePolicy(Policy):
    """One of an attempt's policies.

    Its calls raise `RequestError` where the engine can never serve them or hosts the genome no
    longer, and `EngineError` where the engine failed.
    """

    def __init__(self, attempt: Attempt, target: Target) -> None:
        self.attempt = attempt
        self.target: Target = target

    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        """Sample one action, with the attempt's next seed if no other is given."""
        attempt = self.attempt
        host = attempt.answering(self.target)
        if seed is None:
            seed = attempt.seed_of_call(attempt.num_calls)
        attempt.num_calls += 1
        params = _limited(params or attempt.sampling, observation.max_tokens)
        request = SampleRequest(self.target, observation, params, seed)
        with attempt.clock.stopped():
            return await host.sample(request)

    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        """Return the log-probability of each continuation token."""
        attempt = self.attempt
        host = attempt.answering(self.target)
        request = LogprobsRequest(self.target, tuple(prompt_T), tuple(continuation_T))
        with attempt.clock.stopped():
            return await host.logprobs(request)

    @property
    def sampling(self) -> SamplingParams:
        return self.attempt.sampling

    @property
    def context_length(self) -> int:
        return self.attempt.engine.traits.context_length

    @property
    def centre(self) -> "EnginePolicy":
        return EnginePolicy(self.attempt, "centre")

    @property
    def base(self) -> "EnginePolicy":
        return EnginePolicy(self.attempt, "base")


def _limited(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    if max_tokens is None or max_tokens >= params.max_tokens:
        return params
    return chz.replace(params, max_tokens=max_tokens)


@dataclasses.dataclass(eq=False)
class RolloutGroup:
    """The attempts of a population at one problem, from making its Envs to closing them.

    Attributes:
        builder: the problem.
        engine: answers where an Env asks the centre or the base.
        sampling: sampling parameters of policies, unless their Env has others.
        num_genomes: number of genomes of the population.
        seeds_K: sampling seed of each attempt's n-th call; the same for every genome.
        watch: stops code that has control for too long.
        ended: called with each attempt that has ended.
    """

    builder: EnvGroupBuilder
    engine: Engine
    sampling: SamplingParams
    num_genomes: int
    seeds_K: Sequence[Callable[[int], int]]
    watch: Watch
    ended: Callable[[Trajectory | LostRollout], None] | None = None

    def __post_init__(self) -> None:
        self._handle: EnvGroup | None = None
        self._is_opening = False
        self._is_open = anyio.Event()
        self._num_left = num_envs = self.num_genomes * self.num_attempts
        self._policies: list[EnginePolicy | None] = [None] * num_envs
        self._trajectories: list[Trajectory | LostRollout] = [_NOT_RUN] * num_envs
        self._group_rewards: Sequence[GroupReward] | None = None

    @property
    def num_attempts(self) -> int:
        """Attempts of each genome."""
        return len(self.seeds_K)

    async def attempt(
        self, block: ResidentBlock, g: int, target: Target, k: int
    ) -> BaseException | None:
        """Run attempt k of genome g; the first of the group makes the Envs, the last scores.

        Returns what stops the run: raised, asyncio would print it where that ends by Ctrl-C.
        """
        clock, i = Clock(self.watch), g * self.num_attempts + k
        shared = Attempt(self.engine, self.sampling, block, self.seeds_K[k], clock)
        policy = EnginePolicy(shared, target)
        try:
            if not self._is_open.is_set():
                await self._open()
            if self._handle is None or self.watch.is_stopping:  # Without Envs all are lost.
                return None
            self._policies[i] = policy
            work = functools.partial(run_rollout, self._handle.envs[i], policy)
            self._trajectories[i] = await _guarded(clock, work)
            if self.ended is not None:
                self.ended(self._trajectories[i])
            self._num_left -= 1
            if self._num_left == 0 and not self.watch.is_stopping:
                await self._score()
                await self.close()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.watch.stop()
            return error
        return None

    async def close(self) -> None:
        """Close the handle once, even while being cancelled."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        closed = await _guarded(Clock(self.watch, is_shielded=True), handle.close)
        if isinstance(closed, LostRollout):
            told = "\n".join(filter(None, (closed.reason, closed.traceback)))
            _logger.warning("closing a group of %s failed: %s", self._name, told)

    def result(self) -> TrajectoryGroup:
        """Return the group as an array of genomes x attempts."""
        given = self._group_rewards
        return TrajectoryGroup(
            self._by_genome(self._trajectories),
            None if given is None else self._by_genome(given),
            self.builder.tags,
        )

    def _by_genome(self, flat: Sequence[_T]) -> list[Sequence[_T]]:
        return [flat[i : i + self.num_attempts] for i in range(0, len(flat), self.num_attempts)]

    @property
    def _name(self) -> str:
        return type(self.builder).__qualname__

    async def _open(self) -> None:
        if self._is_opening:
            await self._is_open.wait()
            return
        self._is_opening = True
        try:
            made = await _guarded(Clock(self.watch), self._make_envs)
            if isinstance(made, LostRollout):
                self._trajectories = [made] * len(self._trajectories)
                await self.close()
        finally:
            self._is_open.set()

    async def _make_envs(self) -> None:
        num_envs = len(self._trajectories)
        found = cast(object, await self.builder.make_envs(num_envs))
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
        clock = Clock(self.watch)
        for policy in policies:
            policy.attempt.clock = clock

        async def rewards() -> Sequence[GroupReward | LostRollout] | None:
            found = await self.builder.compute_group_rewards(self._trajectories, policies)
            return checked_group_rewards(self._name, found, self._trajectories)

        given = await _guarded(clock, rewards)
        if isinstance(given, LostRollout):
            self._trajectories = [given] * len(self._trajectories)
        elif given is not None:
            self._group_rewards = [self._kept(i, each) for i, each in enumerate(given)]

    def _kept(self, i: int, given: GroupReward | LostRollout) -> GroupReward:
        """Return a group reward; if it is a lost rollout, mark it as lost and return 0."""
        if isinstance(given, GroupReward):
            return given
        self._trajectories[i] = given
        return GroupReward(0.0)


@contextlib.asynccontextmanager
async def running(groups_P: Sequence[RolloutGroup], watch: Watch) -> AsyncGenerator[None]:
    """Run attempts at these problems in the block, and close all groups at its end.

    Task groups wrap errors; this raises the one error that the user should read.
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
        raise (_what_stops(errors) or next(leaves(errors))) from None


async def attempted(groups_P: Sequence[RolloutGroup], block: ResidentBlock, watch: Watch) -> None:
    """Run all attempts of a block's genomes, and score the groups that they complete.

    In plain tasks, not those of a task group: each would have a cancel scope beside its clock's.
    """
    loop = asyncio.get_running_loop()
    tasks = [
        asyncio.Task(group.attempt(block, g, target, k), loop=loop, name="attempt")
        for group in groups_P
        for g, target in zip(block.range_G, block.targets_G, strict=True)
        for k in range(group.num_attempts)
    ]
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
    """Wait for all, the last first: by then most have ended, and cost no separate call."""
    for task in reversed(tasks):
        if not task.done():
            await asyncio.wait((task,))
    return [e for task in tasks if not task.cancelled() and (e := task.result()) is not None]


async def _guarded(clock: Clock, work: Callable[[], Awaitable[_T]]) -> "_T | LostRollout":
    """Run the user's code; if it fails or is not done in time, its rollout is lost.

    Raises:
        BaseException: What stops the run.
    """
    try:
        with clock.running():
            return await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if clock.is_stopping or task is None:
            raise
        # The code awaited something that was cancelled, or cancelled its own task.
        while task.uncancel():
            pass
        return _lost(error)
    except BaseException as error:
        if (stop := _what_stops(error)) is not None:
            raise stop from None
        return _lost(error)
    return LostRollout(clock.reason or "", clock.overdue_at or "")


def _lost(error: BaseException) -> LostRollout:
    return LostRollout(with_class(error), "".join(traceback.format_exception(error)))


def _what_stops(error: BaseException) -> BaseException | None:
    """Return the error in a group that no other rollout would survive, if there is one."""
    kinds = KeyboardInterrupt | RequestError | EngineError
    return next((each for each in leaves(error) if isinstance(each, kinds)), None)
