"""How a run opens, whatever moves its model, and that it is closed again however it ends.

    async with opened(EvolutionStrategies(config)) as run:
        if run is not None:
            await train_in_turn(run)

What one kind of run does in its own way is its `Mover`'s: how its directory is read, and what it
loads and brings to where the run stands.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from es_cookbook.common.terminal import say
from es_cookbook.engines.base import Engine
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.rl.data.problem_dataset import validate
from es_cookbook.rl.types import Datasets, EnvGroupBuilder
from es_cookbook.runs.directory.directory import (
    LOG,
    METRICS,
    Recorded,
    failures_logged,
    keep_date,
    keep_trained_on,
    locked,
)
from es_cookbook.runs.recorder import Recorder
from es_cookbook.runs.run_config import RunConfig, closing
from es_cookbook.runs.tracking.base import RunInfo, Tracker, Trackers
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.runs.tracking.log import libraries_quiet, library_log
from es_cookbook.runs.tracking.measures import Progress


class _Run(Protocol):
    @property
    def generations(self) -> range:
        """Those that are still to come."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Records them."""
        ...


_OpenRun = TypeVar("_OpenRun", bound=_Run, covariant=True)


class Mover(ABC, Generic[_OpenRun]):
    """What moves the model of a run: evolution strategies, or the gradients of a plug-in.

    Attributes:
        log_path: the run directory, which is this process's alone while the mover is used.
    """

    log_path: Path

    @abstractmethod
    async def find(self, recorded: Recorded) -> str:
        """Refuse what cannot begin or go on, before a model is loaded.

        Args:
            recorded: what is recorded in the run directory.

        Returns:
            A sentence if the run is complete, else nothing.

        Raises:
            ESCookbookError: Anything that the user can put right, in one sentence.
        """

    @abstractmethod
    async def open(self, stack: contextlib.AsyncExitStack) -> _OpenRun:
        """Load everything and bring it to where the run stands; `stack` closes it.

        The run directory is changed last, so that a mistake in anything else leaves it alone.

        Raises:
            ESCookbookError: As `find`.
        """


@contextlib.asynccontextmanager
async def opened(
    mover: Mover[_OpenRun], recorded: Recorded | None = None
) -> AsyncGenerator[_OpenRun | None]:
    """Open a run, new or recorded; closes all of it in the end. A complete one is None.

    Args:
        mover: of the run.
        recorded: in its directory, if the caller has it locked.

    Raises:
        RunDirectoryError: The directory cannot be used, another process writes it, or it holds a
            run that cannot go on with this Config; says what can be done instead.
        ESCookbookError: Anything else that the user can put right, in one sentence.
    """
    log_path = mover.log_path
    async with contextlib.AsyncExitStack() as stack:
        recorded = recorded or stack.enter_context(locked(log_path))
        stack.enter_context(failures_logged(log_path))
        if complete := await mover.find(recorded):
            print(complete)
            yield None
            return
        del recorded  # A long run does not keep its past in memory.
        stack.enter_context(library_log(log_path / LOG))
        run = await mover.open(stack)
        stack.enter_context(rare_garbage_collection())
        await run.recorder.begin(run.generations.start)
        yield run
        await run.recorder.finish()


async def open_engine(
    config: RunConfig, stack: contextlib.AsyncExitStack
) -> tuple[Engine, Datasets]:
    """The engine of any run, which the stack closes, and its problems."""
    where = f"{config.log_path}: " if config.log_path else ""
    say(f"{where}loading {config.model_name} on {config.engine.name}")
    with libraries_quiet():
        engine = await config.engine(model_name=config.model_name, search_space=config.space)
    await stack.enter_async_context(closing(engine))
    if config.log_path:
        keep_date(Path(config.log_path), engine.tokenizer)
    return engine, await load_problems(config, engine)


async def load_problems(config: RunConfig, engine: Engine) -> Datasets:
    """The problems of any run, checked."""
    with libraries_quiet():
        datasets = await config.dataset(engine.tokenizer)
    await validate(datasets, engine.tokenizer, engine.traits.context_length, config.sampling)
    return datasets


def begin_recording(
    config: RunConfig,
    info: RunInfo,
    sampler: PopulationSampler,
    datasets: Datasets,
    stack: contextlib.AsyncExitStack,
    *,
    forked: int = 0,
    trained_on: Sequence[tuple[int, ...]] = (),
    extra_P: Sequence[EnvGroupBuilder] = (),
    trackers: Sequence[Tracker] = (),
) -> Recorder:
    """Keep what a run's directory says about it, and open its trackers.

    Args:
        config: of the run.
        info: about it; what was measured before is added here.
        sampler: evaluates the model.
        datasets: its problems.
        stack: closes the trackers.
        forked: generations that are another run's.
        trained_on: digests of further problems that are trained on.
        extra_P: held-out problems of which only the Envs' metrics are measured.
        trackers: further ones, told after the run's own.
    """
    start = info.start_generation
    keep_trained_on(info.path, datasets, start, forked, trained_on)
    if config.evaluates(start) and datasets.test_P:
        when = f"before generation {start + 1}" if start else "before the first generation"
        when = "after the last generation" if start == config.num_generations else when
        say(f"evaluating {len(datasets.test_P):,} held-out problems {when}")
    info.measured = read_metrics(info.path / METRICS)
    tracker = Trackers([config.trackers(info), *trackers])
    stack.callback(tracker.close)
    how = config.eval_attempts, config.eval_temperature
    return Recorder(
        config=config,
        engine=sampler.engine,
        dataset=datasets.train,
        tracker=tracker,
        progress=Progress(info.measured[-1] if info.measured else {}),
        evaluate=functools.partial(evaluate, sampler, datasets.test_P, *how, extra_P),
    )
