"""Runs every genome on every problem, concurrently, on one engine or many.

A free engine takes a block of the genomes that are left, as many as it can
finish by the time at which all engines could end (`scheduling`). A block is a task that borrows the
engine, makes its genomes resident, runs their rollouts and gives the engine back. All rollouts
are separate tasks, so slow graders, judges and long answers block nothing else, and engines always
have something to batch. A group (one problem, all genomes) is scored and closed as soon as
its last rollout ends, and closed also when the run is cancelled.

The one idea is common random numbers: the sampling seed is a function of (run seed, generation,
problem, attempt, turn) and not of the genome, so that genomes differ by what they are and not by
their luck.

Failures: an Env's exception or time-out loses its own rollout (NaN, counted); a request that no
engine could serve is the user's mistake and stops the run with its sentence; so does an engine that
failed. The time-out counts only the time for which the Env has had control, waiting for the engine
left out: a large population is slow, not hung.

Left out: retrying a lost rollout. The generation goes on without it, and the next one is fresh
anyway. And blocks of a population that plays itself: genomes that are asked for group rewards
(`EnvGroupBuilder.asks_genomes`) have to be resident together.
"""

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import TypeAlias

import anyio

from es_cookbook.common.errors import ConfigError, TooManyLostError
from es_cookbook.common.machine.spans import NO_SPANS, Spans
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import one_line, printable
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Genome
from es_cookbook.population.group import ResidentBlock, RolloutGroup, attempted, running
from es_cookbook.population.results import problem_names
from es_cookbook.population.scheduling import BlockScheduler, Overlap
from es_cookbook.rl.data.problem_dataset import compares
from es_cookbook.rl.problem_env import own_frames
from es_cookbook.rl.timeouts import Watch
from es_cookbook.rl.types import (
    EnvGroupBuilder,
    LostRollout,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)

_MOST_KINDS = 20
"""Most kinds of lost rollouts that are reported, and tracebacks that are kept."""
_MOST_CHARS = 8_000
"""Most characters kept of a traceback, its end: that says what happened."""
_OBJECTS_BETWEEN_COLLECTIONS = 50_000
_Loss: TypeAlias = tuple[str, int, LostRollout]
"""Name of the problem, number of the genome, and what happened."""

_logger = logging.getLogger(__name__)


_LEAST_SECONDS, _LEAST_SHARE = 2.0, 0.05
"""Least elapsed time and share done for an estimate of the time left."""


@dataclasses.dataclass(slots=True, eq=False)
class Rollouts:
    """The rollouts of one generation, or of an evaluation.

    Attributes:
        generation: None of an evaluation.
        count: number of all rollouts.
        began: start time, by `time.monotonic`.
        num_done: number of rollouts that have ended, `num_lost` of them lost.
        is_over: all have ended, or the run has.
    """

    generation: int | None
    count: int
    began: float = dataclasses.field(default_factory=time.monotonic)
    num_done: int = 0
    num_lost: int = 0
    is_over: bool = False
    _total: float = 0.0
    _num_rewards: int = 0

    def ended(self, rollout: Trajectory | LostRollout, has_reward: bool) -> None:
        """Count one; whether its own reward is what its genome earned, or only a part of it."""
        self.num_done += 1
        if isinstance(rollout, LostRollout):
            self.num_lost += 1
        elif has_reward:
            self._total += rollout.reward
            self._num_rewards += 1

    @property
    def mean_reward(self) -> float:
        """Mean over ended rollouts with a reward of their own; NaN if there are none."""
        return self._total / self._num_rewards if self._num_rewards else math.nan

    @property
    def seconds(self) -> float:
        """Seconds since they began."""
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        """Seconds until all have ended, if the others take as long; NaN if too early to tell."""
        if self.num_done < _LEAST_SHARE * self.count or self.seconds < _LEAST_SECONDS:
            return math.nan
        return self.seconds * (self.count - self.num_done) / self.num_done


@dataclasses.dataclass(slots=True, eq=False)
class Underway:
    """Work in progress of a run.

    Attributes:
        rollouts: rollouts that began last; None before the first.
    """

    rollouts: Rollouts | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """Breakdown of the last call's time."""

    load: float = 0.0
    """Making genomes resident, on average over the engines."""
    sample: float = 0.0
    """All the rest of the rollouts, from making the Envs to closing them."""
    score: float = 0.0
    """The part of `sample` in which at least one Env or group reward had control."""


@dataclasses.dataclass(eq=False, kw_only=True)
class PopulationSampler:
    """Samples the rollouts of a population: every genome attempts every problem.

    Attributes:
        engine: one, or a pool of them; this sampler decides which genomes are resident.
        sampling: sampling parameters of every policy, unless its Env has others.
        sampling_at: those of a generation's genomes, if they change over a run.
        attempts: K, rollouts of one genome at one problem.
        rollout_timeout: seconds for which one rollout's Env may have control, and a group be made,
            scored or closed.
        turn_timeout: seconds for which it may have control in one turn, from `initial_observation`
            or a `step` to the next; None for as long as in all of them.
        max_failed_fraction: stop when more than this fraction of a generation's rollouts is lost.
        run_seed: the run's seed, from which sampling seeds are derived.
        log: takes a text with the traceback of a lost rollout, and returns in which file it is,
            or None where it cannot be kept; None for no log.
        seconds: breakdown of the last call's time.
        spans: receives the times at which engines load and sample, and Envs have control.
        underway: receives the progress of rollouts.
    """

    engine: Engine = dataclasses.field(kw_only=False)
    sampling: SamplingParams
    sampling_at: Callable[[int], SamplingParams] | None = None
    attempts: int = 1
    rollout_timeout: float = 600.0
    turn_timeout: float | None = None
    max_failed_fraction: float = 0.1
    run_seed: int = 0
    log: Callable[[str], Path | None] | None = None
    seconds: Seconds = dataclasses.field(default=Seconds(), init=False)
    spans: Spans = dataclasses.field(default=NO_SPANS, init=False)
    underway: Underway = dataclasses.field(default_factory=Underway, init=False)
    _kinds_warned: set[tuple[str, str]] = dataclasses.field(
        default_factory=set[tuple[str, str]], init=False
    )
    _scheduler: BlockScheduler = dataclasses.field(default_factory=BlockScheduler, init=False)

    async def rollout(
        self,
        generation: int,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        genomes_G: Sequence[Genome],
        overlap: Overlap | None = None,
    ) -> list[TrajectoryGroup]:
        """Sample K attempts of every genome at every problem; returns one group per problem.

        Args:
            generation: generation from which sampling seeds are derived.
            env_group_builders_P: the problems.
            genomes_G: the population.
            overlap: how the generation shares engines with the next; None: not at all.

        Raises:
            ConfigError: Group rewards ask genomes, and an engine cannot host all of them.
            TooManyLostError: More than `max_failed_fraction` of the rollouts were lost.
            RequestError: A request that the engine can never serve.
            EngineError: The engine failed.
        """
        together = self._check_asking(env_group_builders_P, len(genomes_G))
        sampling = self.sampling if self.sampling_at is None else self.sampling_at(generation)
        size = len(genomes_G), self.attempts
        async with self._rollouts(generation, env_group_builders_P, size, sampling) as rollouts:
            self._scheduler.begin(len(genomes_G))
            num_engines = 1 if together else self.engine.num_engines

            async def run_block() -> None:
                """Wait for an engine and let it take genomes, while the next ones wait."""
                async with self.engine.lend(overlap and overlap.centre) as host:
                    capacity = self.engine.traits.capacity
                    taken = self._scheduler.take(host.label, num_engines, capacity)
                    if self._scheduler.num_left:
                        blocks.start_soon(run_block)
                    elif overlap is not None:
                        overlap.all_taken.set()
                    own_G = genomes_G[taken.range_G.start : taken.range_G.stop]
                    block = ResidentBlock(
                        taken.range_G, range(len(own_G)), has_own_centre=overlap is not None
                    )
                    began = time.perf_counter()
                    try:
                        with self.spans.span(host.label, "load"):
                            await host.load(own_G)
                        rollouts.load_seconds += (time.perf_counter() - began) / num_engines
                        block.host = host
                        with self.spans.span(host.label, "sample"):
                            await attempted(rollouts.groups_P, block, rollouts.watch)
                    finally:
                        self._scheduler.end(taken)
                    block.host = None

            async with anyio.create_task_group() as blocks:
                blocks.start_soon(run_block)
        return rollouts.results_P

    async def rollout_centre(
        self,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        sampling: SamplingParams,
        attempts: int = 1,
        generation: int | None = None,
    ) -> list[TrajectoryGroup]:
        """Sample attempts of the centre at every problem; resident genomes are kept.

        Sampling seeds are those of a training generation, or of every evaluation if None.

        Raises:
            TooManyLostError: More than `max_failed_fraction` of the rollouts were lost.
            RequestError: A request that the engine can never serve.
            EngineError: The engine failed.
        """
        size = 1, attempts
        async with self._rollouts(generation, env_group_builders_P, size, sampling) as rollouts:
            centre = ResidentBlock(range(1), ["centre"])
            await attempted(rollouts.groups_P, centre, rollouts.watch)
        return rollouts.results_P

    def _check_asking(
        self, env_group_builders_P: Sequence[EnvGroupBuilder], num_genomes: int
    ) -> bool:
        """Return whether group rewards ask genomes, which then must be resident together."""
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

    @contextlib.asynccontextmanager
    async def _rollouts(
        self,
        generation: int | None,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        size: tuple[int, int],
        sampling: SamplingParams,
    ) -> AsyncGenerator["_Rollouts"]:
        """Run the rollouts of a training generation in the block, or of an evaluation if None.

        `size` is how many genomes there are, and attempts of each at a problem.
        """
        began = time.perf_counter()
        num_genomes, num_attempts = size
        seeds = ("evaluation",) if generation is None else ("sampling", generation)
        seed_of = functools.partial(derive_seed, self.run_seed, *seeds)
        count = len(env_group_builders_P) * num_genomes * num_attempts
        underway = self.underway.rollouts = Rollouts(generation, count)
        watch = Watch(self.rollout_timeout, self.turn_timeout, self.spans)
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
                functools.partial(underway.ended, has_reward=_earns(builder)),
            )
            for p, builder in enumerate(env_group_builders_P)
        ]
        rollouts = _Rollouts(groups_P, watch)
        try:
            async with running(groups_P, watch):
                yield rollouts
        finally:
            underway.is_over = True
        total = time.perf_counter() - began
        self.seconds = Seconds(rollouts.load_seconds, total - rollouts.load_seconds, watch.seconds)
        rollouts.results_P = [group.result() for group in groups_P]
        losses = _losses(problem_names(env_group_builders_P), rollouts.results_P)
        what = "an evaluation" if generation is None else f"generation {generation + 1}"
        self._warn(losses, count, what)
        if len(losses) > self.max_failed_fraction * count:
            _, _, first = losses[0]
            raise TooManyLostError(
                f"{len(losses)} of the {count} rollouts of {what} were lost, more than "
                f"max_failed_fraction={self.max_failed_fraction:g} allows; the first: "
                f"{first.reason}\n{own_frames(first.traceback)}".rstrip()
            )

    def _warn(self, losses: Sequence[_Loss], num_rollouts: int, what: str) -> None:
        """Warn of each new kind of loss in one line; its traceback goes to the run's log.

        A run goes on without a lost rollout, so its user has to hear of it, on a terminal or not.
        """
        by_kind: dict[tuple[str, str], list[_Loss]] = {}
        for loss in losses:
            by_kind.setdefault(_kind(loss[-1]), []).append(loss)
        for kind, (first, *others) in by_kind.items():
            if kind in self._kinds_warned or len(self._kinds_warned) == _MOST_KINDS:
                continue
            self._kinds_warned.add(kind)
            name, genome, lost = first
            sentence = (
                f"{what}: {1 + len(others)} of {num_rollouts} rollouts lost, the first at "
                f"{one_line(name)} by genome {genome}: "
                f"{printable(lost.reason):.500}"
            )
            trace = lost.traceback[-_MOST_CHARS:]
            if self.log and trace and (path := self.log(f"{sentence}\n{trace}")):
                sentence += f"; its traceback is in {path}"
            _logger.warning("%s", sentence)


def _earns(problem: EnvGroupBuilder) -> bool:
    """Return whether each attempt has its own reward, and this tells how good the attempt is."""
    return problem.is_graded and not compares(problem)


@dataclasses.dataclass(slots=True)
class _Rollouts:
    """Rollouts that are being run; `load_seconds`: mean time that an engine loaded genomes."""

    groups_P: Sequence[RolloutGroup]
    watch: Watch
    results_P: list[TrajectoryGroup] = dataclasses.field(default_factory=list[TrajectoryGroup])
    load_seconds: float = 0.0


def _losses(names_P: Sequence[str], groups_P: Sequence[TrajectoryGroup]) -> list[_Loss]:
    return [
        (name, g, trajectory)
        for name, group in zip(names_P, groups_P, strict=True)
        for g, trajectories_K in enumerate(group.trajectories_G_K)
        for trajectory in trajectories_K
        if isinstance(trajectory, LostRollout)
    ]


def _kind(lost: LostRollout) -> tuple[str, str]:
    """Return the class of the exception, and the last line of code in its traceback."""
    places = [line for line in lost.traceback.split("\n") if line.startswith("  File ")]
    return lost.reason.partition(":")[0], places[-1] if places else ""


@contextlib.contextmanager
def rare_garbage_collection() -> Generator[None]:
    """Make the garbage collector ignore existing objects, and run less often, for a block.

    A generation makes tens of thousands of objects, and hardly any of them need the collector.
    Without this it walks the model and the libraries again each time, and the rollouts under way
    over and over, which takes longer than all the rest of the bookkeeping
    (`benchmarks/scheduler.py`).
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
