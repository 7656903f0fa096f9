"""Opening of runs of any kind, and closing them however they end.

    async with opened(EvolutionStrategies(config)) as run:
        if run is not None:
            await train_in_turn(run)

A `Mover` does the parts that differ between kinds of runs: it reads the directory, loads
everything, and restores the state of the run.

While a command trains, libraries write to the run's `log.txt` instead of the screen. transformers,
datasets and others log on stderr through handlers that they create when they are imported, and
keep. So while they are imported and load things, stderr is a stream that leads into the log
(`libraries_quiet`). Python's own warnings and the root logger are sorted by file: those of
libraries are logged, those of es_cookbook or a script are shown. A script that calls `train`
by itself keeps its own logging.
"""

import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from io import TextIOBase
from pathlib import Path
from typing import Generic, Protocol, TextIO, TypeVar, cast

from typing_extensions import override

from es_cookbook.common.files import appending
from es_cookbook.common.terminal import is_program, printable, say, screen
from es_cookbook.engines.base import Engine
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.rl.data.problem_dataset import told_golds, validate
from es_cookbook.rl.objectives import Mean, Objective, PassAtK, outcomes
from es_cookbook.rl.types import Datasets, EnvGroupBuilder
from es_cookbook.runs.config import RunConfig, closing
from es_cookbook.runs.directory.directory import (
    LOG,
    Recorded,
    failures_logged,
    keep_trained_on,
    locked,
)
from es_cookbook.runs.recorder import Progress, Recorder
from es_cookbook.runs.tracking.base import RunInfo, Tracker, Trackers


class _Run(Protocol):
    @property
    def generations(self) -> range:
        """Generations still to come."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Records these generations."""
        ...


_OpenRun = TypeVar("_OpenRun", bound=_Run, covariant=True)


class Mover(ABC, Generic[_OpenRun]):
    """Moves the model of a run: evolution strategies, or the gradients of a plug-in.

    Attributes:
        log_path: the run directory, locked while the mover is used.
    """

    log_path: Path

    @abstractmethod
    async def find(self, recorded: Recorded) -> str:
        """Refuse a run that cannot begin or continue, before a model is loaded.

        Args:
            recorded: the contents of the run directory.

        Returns:
            A sentence if the run is complete, else nothing.

        Raises:
            ESCookbookError: Anything that the user can put right, in one sentence.
        """

    @abstractmethod
    async def open(self, stack: contextlib.AsyncExitStack) -> _OpenRun:
        """Load everything and restore the state of the run; `stack` closes it.

        The run directory is changed last, so that a mistake in anything else leaves it alone.

        Raises:
            ESCookbookError: As `find`.
        """


@contextlib.asynccontextmanager
async def opened(
    mover: Mover[_OpenRun], recorded: Recorded | None = None
) -> AsyncGenerator[_OpenRun | None]:
    """Open a run, new or recorded, and close it in the end; yields None if it is complete.

    Args:
        mover: mover of the run.
        recorded: the contents of its directory, if the caller has locked it.

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
    """Load the problems of a run, then its model; the stack closes the engine.

    In this order a mistake in the problems is reported before the model is loaded. Checks that need
    the engine's context come last.
    """
    where = f"{config.log_path}: " if config.log_path else ""
    say(f"{where}loading {config.model_name} on {config.engine.name}")
    datasets = await load_problems(config)
    with libraries_quiet():
        engine = await config.engine(model_name=config.model_name, search_space=config.space)
    await stack.enter_async_context(closing(engine))
    await check_fit(config, engine, datasets)
    return engine, datasets


async def load_problems(config: RunConfig) -> Datasets:
    """Load the problems of a run, and check what can be checked without an engine."""
    with libraries_quiet():
        tokenizer = config.engine.tokenizer(config.model_name)
        datasets = await config.dataset(tokenizer)
    config.check_problems(datasets.train)
    objective = getattr(config, "objective", None)
    if isinstance(objective, Objective) and not isinstance(objective, Mean):
        problems_P = datasets.train.training_problems or datasets.train.get_batch(0)
        if told_P := await told_golds(problems_P, tokenizer, config.attempts):
            scores_P_G = objective(outcomes(told_P))  # Refuses metrics that no Env reports.
            if isinstance(objective, PassAtK) and (count := int((scores_P_G < 1).sum())):
                say(
                    f"objective=pass_at_k: {count} of {len(told_P)} gold answers do not count as "
                    "solved (objective.metric, objective.threshold), so no genome can solve those"
                )
    return datasets


async def check_fit(config: RunConfig, engine: Engine, datasets: Datasets) -> None:
    """Check that problems fit into the engine's context and that their gold answers score."""
    await validate(datasets, engine.tokenizer, engine.traits.context_length, config.sampling)


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
    """Record the training problems of a run, and open its trackers.

    Args:
        config: config of the run.
        info: information about the run.
        sampler: evaluates the model.
        datasets: its problems.
        stack: closes the trackers.
        forked: number of generations that come from another run.
        trained_on: digests of further problems that are trained on.
        extra_P: held-out problems for which only the Envs' metrics are measured.
        trackers: further trackers, called after the run's own.
    """
    start = info.start_generation
    keep_trained_on(info.path, datasets, start, forked, trained_on)
    if config.evaluates(start) and datasets.test_P:
        when = f"before generation {start + 1}" if start else "before the first generation"
        when = "after the last generation" if start == config.num_generations else when
        say(f"evaluating {len(datasets.test_P):,} held-out problems {when}")
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


class _Log(TextIOBase):
    """Stands in for stderr: writes to the log of the current run, or to the screen without one.

    One object for all runs of a process, since libraries keep it.
    """

    def __init__(self) -> None:
        self.path: Path | None = None

    @override
    def write(self, text: str, /) -> int:
        if self.path is None:
            screen().write(text)
        elif not text.startswith("\r"):  # A progress bar, which redraws itself.
            self.append(text)
        return len(text)

    def append(self, text: str) -> None:
        """Write to the log, unless the disk refuses."""
        if self.path is not None:
            with contextlib.suppress(OSError), appending(self.path) as file:
                file.write(text)

    @override
    def fileno(self) -> int:
        return screen().fileno()


_log = _Log()


@contextlib.contextmanager
def library_log(path: Path) -> Generator[None]:
    """Send messages of libraries to this file, which is created with the first one."""
    if not is_program():
        yield
        return
    root, own = logging.getLogger(), logging.getLogger("es_cookbook")
    before, level, handler = _log.path, own.level, _Sorting()
    _log.path = path
    if takes_over := not root.handlers:  # A script that has set up logging keeps it.
        root.addHandler(handler)
        own.setLevel(logging.INFO)
        logging.captureWarnings(True)
    try:
        yield
    finally:
        _log.path = before
        if takes_over:
            logging.captureWarnings(False)
            root.removeHandler(handler)
            own.setLevel(level)


@contextlib.contextmanager
def libraries_quiet() -> Generator[None]:
    """Send stderr to the log file too, if the block is inside a `library_log`."""
    if _log.path is None:
        yield
        return
    with contextlib.redirect_stderr(cast(TextIO, _log)):
        yield


class _Sorting(logging.Handler):
    """Shows warnings of es_cookbook or a script, and logs everything else."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_pythons = record.name == "py.warnings"  # Its text begins with the file.
        file = Path(text.partition(":")[0] if is_pythons else record.pathname)
        is_library = "site-packages" in file.parts and not record.name.startswith("es_cookbook")
        if record.levelno < logging.WARNING or is_library:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            _log.append(f"{when} {record.name}: {text}\n")
        else:
            with contextlib.suppress(OSError, ValueError):  # Closed; the run continues.
                print(printable(text.strip()), file=screen(), flush=True)
