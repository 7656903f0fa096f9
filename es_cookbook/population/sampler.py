"""Who runs what, when: every genome attempts every problem, concurrently, on one engine or many.

Whichever engine is free takes a block of the genomes that nobody has taken yet, as many as it can
finish by the time at which all engines could end (`blocks`). A block is a task that has borrowed
the engine, makes its genomes resident, runs their rollouts and gives the engine back. All rollouts
are tasks of their own, so slow graders, judges and long answers do not hold anybody up, and engines
always have something to batch. A group (one problem, all genomes) is scored and closed as soon as
its last rollout ends, and closed also when the run is cancelled.

The one idea is common random numbers: the sampling seed is a function of (run seed, generation,
problem, attempt, turn) and not of the genome, so that genomes differ by what they are and not by
their luck.

What fails: an Env's exception or time-out loses its own rollout (NaN, counted); a request that no
engine could serve is the user's mistake and stops the run with its sentence; so does an engine that
failed. The time-out counts only the time for which the Env has had control, waiting for the engine
left out: a large population is slow, not hung.

Left out: retrying a lost rollout. The generation goes on without it, and the next one is fresh
anyway. And blocks of a population that plays itself: genomes that are asked for group rewards
(`EnvGroupBuilder.asks_genomes`) have to be resident together.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from es_cookbook.common.errors import ConfigError, TooManyLostError, own_frames
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.spans import NO_SPANS, Spans
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Genome
from es_cookbook.population.blocks import Shares
from es_cookbook.population.group import RolloutGroup, cause_of
from es_cookbook.population.lost import LostRollouts
from es_cookbook.population.policy import EnginePolicy, Residents
from es_cookbook.rl.rollouts import lost_rollouts
from es_cookbook.rl.timeouts import Watch
from es_cookbook.rl.types import EnvGroupBuilder, SamplingParams, TrajectoryGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """Where the last call's time went."""

    load: float = 0.0
    """Making genomes resident, while no engine was sampling yet."""
    sample: float = 0.0
    """All the rest of the rollouts, from making the Envs to closing them."""
    score: float = 0.0
    """The part of `sample` in which at least one Env or group reward had control."""


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


class PopulationSampler:
    """Runs genomes against problems.

    Args:
        engine: one, or a pool of them; this sampler decides which genomes are resident.
        sampling: how every policy samples, unless its Env asks otherwise.
        sampling_at: how genomes of a generation sample, where that changes over a run.
        attempts: K, rollouts of one genome at one problem.
        rollout_timeout: seconds for which one rollout's Env may have control, and a group be made,
            scored or closed.
        turn_timeout: seconds for which it may have control in one turn, from `initial_observation`
            or a `step` to the next; None for as long as in all of them.
        max_failed_fraction: stop when more than this fraction of a generation's rollouts is lost.
        run_seed: the run's seed, from which sampling seeds are derived.
        log_path: run directory, whose log takes tracebacks of lost rollouts; None for no log.

    Attributes:
        spans: takes when engines load and sample, and when Envs have control.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: SamplingParams,
        sampling_at: Callable[[int], SamplingParams] | None = None,
        attempts: int = 1,
        rollout_timeout: float = 600.0,
        turn_timeout: float | None = None,
        max_failed_fraction: float = 0.1,
        run_seed: int = 0,
        log_path: Path | None = None,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self._sampling_at = sampling_at
        self.attempts = attempts
        self.rollout_timeout = rollout_timeout
        self.turn_timeout = turn_timeout
        self.max_failed_fraction = max_failed_fraction
        self.run_seed = run_seed
        self.seconds = Seconds()
        self.spans: Spans = NO_SPANS
        self._warned: set[str] = set()
        self._lost = LostRollouts(log_path)
        self._shares = Shares()

    async def rollout(
        self,
        generation: int,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        genomes_G: Sequence[Genome],
        overlap: "Overlap | None" = None,
    ) -> list[TrajectoryGroup]:
        """Every genome's K attempts at every problem; one group a problem.

        Args:
            generation: from which sampling seeds are derived.
            env_group_builders_P: the problems.
            genomes_G: the population.
            overlap: how the generation shares engines with the next; None: not at all.

        Raises:
            ConfigError: Group rewards ask genomes, and an engine cannot host all of them.
            TooManyLostError: More than `max_failed_fraction` of the rollouts were lost.
            RequestError: A request that the engine can never serve.
            EngineError: The engine failed.
        """
        asks_genomes = self._check_asking(env_group_builders_P, len(genomes_G))
        sampling = self.sampling if self._sampling_at is None else self._sampling_at(generation)
        population = _Population(genomes_G, asks_genomes, overlap)

        async def run(state: _Running) -> None:
            self._shares.begin(len(genomes_G), overlapping=overlap is not None)
            async with anyio.create_task_group() as state.tasks:
                state.tasks.start_soon(self._run_next_block, population, state)

        return await self._run(
            generation, env_group_builders_P, len(genomes_G), run, sampling, self.attempts
        )

    def _check_asking(
        self, env_group_builders_P: Sequence[EnvGroupBuilder], num_genomes: int
    ) -> bool:
        """Whether group rewards ask genomes, which are then resident together."""
        capacity = self.engine.traits.capacity
        asking = [builder for builder in env_group_builders_P if builder.asks_genomes]
        if asking and num_genomes > capacity:
            raise ConfigError(
                f"group rewards of {type(asking[0]).__qualname__} ask genomes, so all "
                f"{num_genomes} have to be resident on one engine, which hosts {capacity}: lower "
                "optimizer.population_size, or raise engine.memory_gib of torch or "
                "engine.max_genomes of vllm"
            )
        return bool(asking)

    async def rollout_centre(
        self,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        sampling: SamplingParams,
        attempts: int = 1,
        generation: int | None = None,
    ) -> list[TrajectoryGroup]:
        """The centre's attempts at every problem; the resident genomes stay.

        Sampling seeds are those of a training generation, or of every evaluation if None.

        Raises:
            TooManyLostError: More than `max_failed_fraction` of the rollouts were lost.
            RequestError: A request that the engine can never serve.
            EngineError: The engine failed.
        """

        async def run(state: _Running) -> None:
            await _run_attempts(Residents(range(1)), state)

        return await self._run(generation, env_group_builders_P, 1, run, sampling, attempts)

    async def _run(
        self,
        generation: int | None,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        num_genomes: int,
        run: "Callable[[_Running], Awaitable[None]]",
        sampling: SamplingParams,
        num_attempts: int,
    ) -> list[TrajectoryGroup]:
        """Every rollout of a training generation, or of an evaluation if None."""
        began = time.perf_counter()
        seeds = ("evaluation",) if generation is None else ("sampling", generation)
        seed_of = functools.partial(derive_seed, self.run_seed, *seeds)
        load_time = _LoadTime()
        watch = Watch(
            self.rollout_timeout,
            warned=self._warned,
            turn_timeout=self.turn_timeout,
            spans=self.spans,
        )
        groups_P = [
            RolloutGroup(
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
            with watch:
                try:
                    await run(_Running(groups_P, watch, load_time))
                finally:
                    with anyio.CancelScope(shield=True):
                        async with anyio.create_task_group() as closing:
                            for group in groups_P:
                                closing.start_soon(group.close)
        except BaseExceptionGroup as errors:
            # Task groups wrap whatever stops them; the user reads the one sentence inside.
            raise cause_of(errors) from None
        total = time.perf_counter() - began
        self.seconds = Seconds(load_time.seconds, total - load_time.seconds, watch.seconds)
        trajectory_groups_P = [group.result() for group in groups_P]
        what = "an evaluation" if generation is None else f"generation {generation}"
        shown = what if generation is None else f"generation {generation + 1}"
        self._lost.tell(shown, env_group_builders_P, trajectory_groups_P)
        self._check_lost(what, trajectory_groups_P, len(groups_P) * num_genomes * num_attempts)
        return trajectory_groups_P

    async def _run_next_block(self, population: "_Population", state: "_Running") -> None:
        """Wait for an engine, let it take genomes, and have the next ones wait meanwhile."""
        overlap = population.overlap
        async with self.engine.lend(overlap and overlap.centre) as host:
            num_engines = 1 if population.together else self.engine.num_engines
            capacity = self.engine.traits.capacity
            taken = self._shares.take(host.label, num_engines, capacity)
            if self._shares.num_left:
                state.tasks.start_soon(self._run_next_block, population, state)
            elif overlap is not None:
                overlap.all_taken.set()
            taken_G = population.genomes_G[taken.range_G.start : taken.range_G.stop]
            block = Residents(taken.range_G, taken_G, has_own_centre=overlap is not None)
            state.load_time.change(loading=1)
            try:
                with self.spans.span(host.label, "load"):
                    await host.load(taken_G)
                state.load_time.change(loading=-1, running=1)
                block.host = host
                with self.spans.span(host.label, "sample"):
                    await _run_attempts(block, state)
            finally:
                self._shares.end(taken)
            block.host = None
            state.load_time.change(running=-1)

    def _check_lost(
        self, what: str, groups_P: Sequence[TrajectoryGroup], num_rollouts: int
    ) -> None:
        lost = lost_rollouts(groups_P)
        if len(lost) > self.max_failed_fraction * num_rollouts:
            first = lost[0]
            raise TooManyLostError(
                f"{len(lost)} of the {num_rollouts} rollouts of {what} were lost, more than "
                f"max_failed_fraction={self.max_failed_fraction:g} allows; the first: "
                f"{first.reason}\n{own_frames(first.traceback)}".rstrip()
            )


async def _run_attempts(block: Residents, state: "_Running") -> None:
    """All of this block's attempts, and the scores of the groups that they complete.

    Plain tasks, not those of a task group: each would have a cancel scope beside its clock's.
    """

    async def attempt(group: RolloutGroup, policy: EnginePolicy, i: int) -> None:
        try:
            await group.attempt(policy, i)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # Kept here: asyncio would report one that a task ends with.
            errors.append(error)
            state.watch.stop()

    errors: list[BaseException] = []
    loop = asyncio.get_running_loop()
    attempts = [
        asyncio.Task(attempt(group, policy, i), loop=loop, name="attempt")
        for group in state.groups_P
        for policy, i in group.policies(block)
    ]
    try:
        await _ended(attempts)
    except asyncio.CancelledError:
        state.watch.stop()
        with anyio.CancelScope(shield=True):
            await _ended(attempts)
        raise
    if errors:
        raise BaseExceptionGroup("attempts that stop the run", errors)


async def _ended(attempts: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all. The last first: by then most have ended, and cost no call of their own."""
    for attempt in reversed(attempts):
        if not attempt.done():
            await asyncio.wait((attempt,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Population:
    """The genomes of a generation.

    Attributes:
        genomes_G: they themselves.
        together: on one engine, since group rewards ask them.
        overlap: with the next generation, if any.
    """

    genomes_G: Sequence[Genome]
    together: bool
    overlap: Overlap | None


@dataclasses.dataclass(slots=True)
class _Running:
    """A generation that is being run; `tasks` wait for engines, one a block."""

    groups_P: Sequence[RolloutGroup]
    watch: Watch
    load_time: "_LoadTime"
    tasks: TaskGroup = dataclasses.field(init=False)


class _LoadTime:
    """Seconds in which genomes were loaded and none was sampled."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_loading = 0
        self._num_running = 0
        self._since = 0.0

    def change(self, loading: int = 0, running: int = 0) -> None:
        """As many blocks more, or less, are being loaded or run."""
        now = time.perf_counter()
        if self._num_loading and not self._num_running:
            self.seconds += now - self._since
        self._since = now
        self._num_loading += loading
        self._num_running += running
