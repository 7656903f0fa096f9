"""A sweep: trials, each under every seed, on several workers.

Each worker takes the next run as soon as it is free. The run directories are the record: complete
runs are not repeated, interrupted ones continue, and a run that fails is reported at the end while
the others go on. The results are a line per trial in `results.md`, and a row per run for the
trackers of the runs (the report writes `results.parquet`). The value of a run is the last one of
the metric; the spread over seeds is the sample standard deviation. Failed runs are listed and do
not count.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, SweepError, did_you_mean, leaves
from es_cookbook.common.terminal import markdown, plural
from es_cookbook.plugins.sweep import worker
from es_cookbook.plugins.sweep.in_turn import is_complete
from es_cookbook.plugins.sweep.search import Space, Study, Trial, Value, draws, ends, grid
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import CONFIG, METRICS, RunLock
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.signals import result_until_signal
from es_cookbook.runs.tracking.curves import is_share
from es_cookbook.runs.tracking.jsonl import CORRECT, read_metrics

State: TypeAlias = Literal["waiting", "running", "interrupted", "complete", "failed"]
Make: TypeAlias = Callable[[Mapping[str, Value]], Config]
"""Builds the Config of a trial's options; the sweep sets its seed and log_path."""
OUTPUT = "output"
"""Folder with the output of the processes, a file per run."""


@chz.chz
class SweepSettings:
    """Seeds, sampler and workers of a sweep."""

    log_path: str = chz.field(default="runs/sweep", doc="directory of all runs")
    seeds: tuple[int, ...] = chz.field(
        default=(0,), doc="seeds of each trial's runs; the table has their mean and spread"
    )
    metric: str = chz.field(
        default=CORRECT, doc="key of metrics.jsonl to maximise; its last value counts"
    )
    sampler: Literal["grid", "random", "optuna"] = chz.field(
        default="grid", doc="all combinations of values, random trials, or Optuna's TPE"
    )
    trials: int = chz.field(default=20, doc="random, optuna: number of trials, each with all seeds")
    sampler_seed: int = chz.field(default=0, doc="random, optuna: seed of the draws")
    workers: int = chz.field(
        default=1, doc="concurrent runs, each with its share of this machine's cores"
    )
    devices: tuple[str, ...] = chz.field(
        default=(), doc="GPUs assigned to the workers in turn, as in CUDA_VISIBLE_DEVICES"
    )

    @chz.validate
    def _fields(self) -> None:
        check_range(self, "trials", "workers", at_least=1)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds must be one or more different ones, found {self.seeds}")
        if len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"devices must be different ones, found {self.devices}")
        if not self.metric:
            raise ConfigError("metric must be a key of metrics.jsonl, found none")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The state of a run of a sweep.

    Attributes:
        run: name of the run directory.
        trial: number of the trial.
        generations: number of recorded generations.
        final: the metric's last value; NaN if it was not measured.
        seconds: total time of the generations.
        problem: why it failed.
    """

    run: str
    trial: int
    options: Mapping[str, Value]
    seed: int
    state: State
    generations: int
    metric: str
    final: float
    seconds: float
    problem: str


def sweep(settings: SweepSettings, make: Make, space: Space) -> list[Result]:
    """Run every trial under every seed, except complete runs.

    Results are written to `results.md` in `settings.log_path` whenever a run has ended, and passed
    to the trackers of the runs (`TrackerBuilder.summarise`); the report's writes `results.parquet`
    and, at the end, `report.html`.

    Args:
        settings: seeds, sampler and workers.
        make: builds the Config of a trial.
        space: the options to vary; empty for the seeds alone.

    Raises:
        ConfigError: There is nothing to draw, the Config of a trial is invalid, or a run does not
            measure the metric.
        RunDirectoryError: Another process runs this sweep, or the directory cannot be written.
        SweepError: Runs failed; all others are complete.
        KeyboardInterrupt: The sweep was stopped; says how to continue.
    """
    if settings.sampler != "grid" and not space:
        raise ConfigError(f"sampler={settings.sampler} needs options to choose, found none")
    if settings.sampler == "random":
        trials = draws(space, settings.trials, settings.sampler_seed)
    else:
        trials = grid(space) if settings.sampler == "grid" else ends(space)
    runs = [run for trial in trials for run in _runs_of(trial, settings, make)]
    for run in runs:
        config_to_json(run.config)
    log_path = Path(settings.log_path)
    if (log_path / CONFIG).exists():
        raise ConfigError(f"log_path {log_path} holds a run; a sweep needs a new directory")
    try:
        (log_path / OUTPUT).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", Path(error.filename or log_path), error, needed=4096) from error
    lock = RunLock(log_path)
    try:
        if settings.sampler != "optuna":
            return _Sweep(settings, runs, len(runs)).run()
        study = Study(space, settings.sampler_seed, settings.metric, log_path)
        chosen = itertools.islice(study.trials(), settings.trials)
        later = ([*_runs_of(trial, settings, make)] for trial in chosen)
        total = settings.trials * len(settings.seeds)
        return _Sweep(settings, next(later), total, later, study.tell).run()
    finally:
        lock.release()


def _runs_of(trial: Trial, settings: SweepSettings, make: Make) -> Iterator["_Run"]:
    config = make(trial.options)
    for seed in settings.seeds:
        log_path = str(Path(settings.log_path) / f"{trial.name}-seed{seed}")
        yield _Run(trial, chz.replace(config, seed=seed, log_path=log_path))


@dataclasses.dataclass(eq=False)
class _Run:
    """A run of a trial and its state."""

    trial: Trial
    config: Config
    state: State = "waiting"
    problem: str = ""

    @property
    def path(self) -> Path:
        return Path(self.config.log_path)

    def result(self, metric: str) -> Result:
        rows = measured(self.path)
        values = [row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))]
        return Result(
            run=self.path.name,
            trial=self.trial.number,
            options=self.trial.options,
            seed=self.config.seed,
            state=self.state,
            generations=sum("time/total" in row for row in rows),
            metric=metric,
            final=values[-1] if values else math.nan,
            seconds=math.fsum(row.get("time/total", 0.0) for row in rows),
            problem=self.problem,
        )


@dataclasses.dataclass(eq=False)
class _Sweep:
    """A sweep in progress.

    Attributes:
        settings: seeds, sampler and workers.
        runs: all runs so far.
        total: number of runs, for messages.
        later: the runs of further trials, each trial chosen when a worker is free for it.
        tell: receives each trial that has ended, and its mean.
    """

    settings: SweepSettings
    runs: list[_Run]
    total: int
    later: Iterator[list[_Run]] = dataclasses.field(default_factory=lambda: iter(()))
    tell: Callable[[Trial, float], None] | None = None

    def __post_init__(self) -> None:
        self._path = Path(self.settings.log_path)
        self._shares = worker.shares(self.settings.workers, self.settings.devices)

    def run(self) -> list[Result]:
        """Run to the end, or to a signal."""
        self._write()
        try:
            result_until_signal(self._work)
        except KeyboardInterrupt:
            self._write()
            raise KeyboardInterrupt(
                f"interrupted with {plural(len(self._in('complete')), 'run')} complete; give the "
                "same command again to go on"
            ) from None
        except BaseExceptionGroup as errors:
            raise next(leaves(errors)) from None
        results, table, said = self._write(is_over=True)
        print(f"\n{table}\n\nwritten to {self._path / 'results.md'}", flush=True)
        if said:
            print(said)
        if failed := self._in("failed"):
            first = failed[0]
            raise SweepError(
                f"{len(failed)} of {plural(len(self.runs), 'run')} failed, {first.path.name} so: "
                f"{first.problem} (all of it is in {self._output(first)})"
            )
        return results

    def _in(self, state: State) -> list[_Run]:
        return [run for run in self.runs if run.state == state]

    def _output(self, run: _Run) -> Path:
        return self._path / OUTPUT / f"{run.path.name}.txt"

    async def _work(self) -> None:
        async with anyio.create_task_group() as group:
            for share in self._shares:
                group.start_soon(self._keep_busy, share)

    async def _keep_busy(self, share: worker.Share) -> None:
        """Train one run after another on a share of the machine."""
        while (run := self._next()) is not None:
            number = self.runs.index(run) + 1
            print(f"run {number} of {self.total} begins: {run.path}", flush=True)
            run.state = "running"
            await self._train(run, share)
            self._write()

    def _next(self) -> _Run | None:
        """Return the next run to start; complete runs before it are reported."""
        while waiting := self._in("waiting") or self._added():
            if not is_complete(waiting[0].config):
                return waiting[0]
            self._end(waiting[0], "complete")
        return None

    def _added(self) -> Sequence[_Run]:
        """Add the runs of another trial, if there is one."""
        runs = next(self.later, [])
        self.runs += runs
        return runs

    async def _train(self, run: _Run, share: worker.Share) -> None:
        """Train a run in a process; interrupt it if this task is cancelled."""
        try:
            run.problem = await worker.train(run.config, share, self._output(run))
        except BaseException:
            run.state = "interrupted"
            raise
        if is_complete(run.config):
            run.problem = ""
            self._end(run, "complete")
        else:
            run.problem = run.problem or f"it ended, but {run.path} holds another run"
            self._end(run, "failed")

    def _end(self, run: _Run, state: State) -> None:
        metric, run.state = self.settings.metric, state
        result = run.result(metric)
        told = f", {metric} {result.final:.4g}" if state == "complete" else f": {run.problem}"
        print(f"{run.path}: {state} after {result.generations} generations{told}", flush=True)
        if state == "complete" and math.isnan(result.final):
            keys = dict.fromkeys(key for row in measured(run.path) for key in row)
            raise ConfigError(
                f"metric {metric!r} is not measured by {run.path}"
                f"{did_you_mean(metric, keys) or '.'} Finished runs are kept: give the same "
                "command with another metric=... to go on"
            )
        results = [other.result(metric) for other in self.runs if other.trial is run.trial]
        if self.tell and all(other.state in ("complete", "failed") for other in results):
            self.tell(run.trial, mean_of_complete(results))

    def _write(self, *, is_over: bool = False) -> tuple[list[Result], str, str]:
        """Write the results so far; returns them, their table, and the trackers' message."""
        results = [run.result(self.settings.metric) for run in self.runs]
        text = table(results, self.settings.metric)
        replace_file(self._path / "results.md", [text.encode(), b"\n"])
        rows = [{**result.options, **dataclasses.asdict(result)} for result in results]
        for row in rows:
            del row["options"]
        said = self.runs[0].config.trackers.summarise(self._path, rows, is_over=is_over)
        return results, text, said


def measured(log_path: Path) -> list[dict[str, float]]:
    """Return the readable metrics of a run, which may be in progress."""
    return read_metrics(log_path / METRICS, damage=[])


def table(results: Sequence[Result], metric: str) -> str:
    """Return a Markdown table with a line per trial, best first."""
    by_trial = itertools.groupby(results, key=lambda result: result.trial)
    trials = [list(of_trial) for _, of_trial in by_trial]
    names = list(results[0].options) if results else []
    heads = [*names, f"{metric}, mean ± spread", "runs", "minutes"]
    return markdown(heads, [_cells(trial_R, metric) for trial_R in sorted(trials, key=_rank)])


def mean_of_complete(results_R: Sequence[Result]) -> float:
    """Return the mean of the final values of complete runs; NaN if there is none."""
    values = [result.final for result in results_R if result.state == "complete"]
    return fmean(values) if values else math.nan


def _rank(trial_R: Sequence[Result]) -> tuple[bool, float]:
    mean = mean_of_complete(trial_R)
    return math.isnan(mean), -mean


def _cells(trial_R: Sequence[Result], metric: str) -> list[str]:
    finals = [result.final for result in trial_R if result.state == "complete"]
    scale, unit = (100, " %") if is_share(metric) else (1, "")

    def shown(value: float) -> str:
        return f"{scale * value:.1f}" if unit else f"{value:.4g}"

    spread = f" ± {shown(stdev(finals))}" if len(finals) > 1 else ""
    counts = collections.Counter(result.state for result in trial_R)
    return [
        *(_text(value) for value in trial_R[0].options.values()),
        f"{shown(fmean(finals))}{spread}{unit}" if finals else "–",
        ", ".join(f"{count} {state}" for state, count in counts.items()),
        f"{math.fsum(result.seconds for result in trial_R) / 60:.1f}",
    ]


def _text(value: Value) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", r"\|")
