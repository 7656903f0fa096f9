"""A sweep: trials from a sampler, each under every seed, on workers that are never idle.

Whoever decides is here, and only here: the next run goes to the first worker that is free, a run
that falls behind is interrupted, one whose process was killed goes on, and a mistake in one is told
in the end while the others are made. A run that was stopped early is marked in `pruned.json`.

What came out is read from the run directories: a line a trial in `results.md`, and a row a run for
the trackers of the runs (by default the report's writes `results.parquet`). The metric's value is
its last; the spread over seeds is the sample standard deviation, shown from two runs on. Runs that
were stopped early or failed are listed, and do not count.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias, cast

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, HistoryError, SweepError, did_you_mean
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.common.terminal import markdown, plural
from es_cookbook.plugins.sweep import worker
from es_cookbook.plugins.sweep.in_turn import is_complete
from es_cookbook.plugins.sweep.search import (
    OptunaSampler,
    Space,
    Trial,
    Value,
    at_random,
    corners,
    grid,
)
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import CONFIG, METRICS
from es_cookbook.runs.directory.lock import RunLock
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.signals import end_on_signals
from es_cookbook.runs.tracking.base import GENERATION, TrackerBuilder
from es_cookbook.runs.tracking.curves import is_share
from es_cookbook.runs.tracking.jsonl import CORRECT, read_metrics

Curve: TypeAlias = Sequence[tuple[int, float]]
"""(generation, metric) of a run, in order; no NaN."""
State: TypeAlias = Literal[
    "waiting", "running", "interrupted", "complete", "pruned", "skipped", "failed"
]
Make: TypeAlias = Callable[[Mapping[str, Value]], Config]
"""The Config of a trial's options; its seed and log_path are the sweep's to set."""
SamplerName: TypeAlias = Literal["grid", "random", "optuna"]
Prune: TypeAlias = Literal["none", "median", "halving"]
PRUNED = "pruned.json"
OUTPUT = "output"
"""Folder of what the processes print, a file a run."""
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_BETWEEN_READINGS = 0.5
_STARTS = 3
"""Of a run whose process is killed again and again."""
_BEST_SHARE = 3


@chz.chz
class SweepSettings:
    """Seeds, sampler, workers and pruning of a sweep."""

    log_path: str = chz.field(default="runs/sweep", doc="directory of all runs")
    seeds: tuple[int, ...] = chz.field(
        default=(0,), doc="of each trial's runs; the table has their mean and spread"
    )
    metric: str = chz.field(
        default=CORRECT, doc="a key of metrics.jsonl; more is better, and its last value counts"
    )
    sampler: SamplerName = chz.field(
        default="grid", doc="all combinations of values, or trials at random or by Optuna's TPE"
    )
    trials: int = chz.field(default=20, doc="random, optuna: how many, each with all seeds")
    sampler_seed: int = chz.field(default=0, doc="random, optuna: of what they draw")
    workers: int = chz.field(
        default=1, doc="runs at a time, each with its share of this machine's cores"
    )
    devices: tuple[str, ...] = chz.field(
        default=(), doc="GPUs that the workers get in turn, as in CUDA_VISIBLE_DEVICES"
    )
    prune: Prune = chz.field(
        default="none",
        doc="stop a run that is below the median of the others, or not among their best third",
    )
    prune_after: int = chz.field(
        default=4, doc="prune: other runs that must have come as far before one is stopped"
    )

    @chz.validate
    def _fields(self) -> None:
        check_range(self, "trials", "workers", "prune_after", at_least=1)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds must be one or more different ones, found {self.seeds}")
        if len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"devices must be different ones, found {self.devices}")
        if not self.metric:
            raise ConfigError("metric must be a key of metrics.jsonl, found none")


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A run of a sweep, as far as it has come.

    Attributes:
        run: its directory's name, `trial` its trial's number.
        state: pruned: it was stopped early; skipped: another seed of its trial was.
        generations: how many it recorded.
        final: the metric's last value, `best` its highest; NaN where it was not measured.
        seconds: of its generations.
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
    best: float
    seconds: float
    problem: str


def sweep(settings: SweepSettings, make: Make, space: Space) -> list[Result]:
    """Run every trial under every seed, what is complete already excepted.

    Results are written to `results.md` in `settings.log_path` whenever a run has ended, and told to
    the trackers of the runs (`TrackerBuilder.summarise`): by default to the report's, which writes
    `results.parquet`, and in the end `report.html`.

    Args:
        settings: how.
        make: the Config of a trial, built once for every one that is known before the first run.
        space: what may be varied; empty for the seeds alone.

    Raises:
        ConfigError: A trial's Config cannot be, or the metric is none of a run's.
        RunDirectoryError: Another process makes this sweep, or the disk refuses.
        SweepError: Runs failed; all others are complete.
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    trials = _known(settings, space)
    configs = [run.config for trial in trials for run in _runs_of(trial, settings, make)]
    for config in configs:
        config_to_json(config)
    trackers = configs[0].trackers
    log_path = Path(settings.log_path)
    if (log_path / CONFIG).exists():
        raise ConfigError(f"log_path {log_path} holds a run; a sweep has a directory of its own")
    try:
        (log_path / OUTPUT).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", Path(error.filename or log_path), error, needed=4096) from error
    lock = RunLock(log_path)
    try:
        if settings.sampler != "optuna":
            num_runs = len(trials) * len(settings.seeds)
            ask = functools.partial(next, iter(trials), None)
            return _Sweep(settings, make, trackers, num_runs, ask, None).run()
        seed, num_runs = settings.sampler_seed, settings.trials * len(settings.seeds)
        sampler = OptunaSampler(space, settings.trials, seed, settings.metric, log_path)
        return _Sweep(settings, make, trackers, num_runs, sampler.ask, sampler.tell).run()
    finally:
        lock.release()


def _known(settings: SweepSettings, space: Space) -> list[Trial]:
    """The trials of the sweep; of a sampler that learns, some with all that may occur in them."""
    match settings.sampler:
        case "grid":
            return grid(space)
        case "random":
            return at_random(space, settings.trials, settings.sampler_seed)
        case "optuna":
            if not space:
                raise ConfigError("sampler=optuna needs options to choose, found none")
            return list(corners(space))


def _runs_of(trial: Trial, settings: SweepSettings, make: Make) -> Iterator["_Run"]:
    config = make(trial.options)
    for seed in settings.seeds:
        log_path = str(Path(settings.log_path) / f"{trial.name}-seed{seed}")
        yield _Run(trial, chz.replace(config, seed=seed, log_path=log_path))


@dataclasses.dataclass(eq=False)
class _Run:
    """A run of a trial, and where it stands; `process` and `share` are of the last start."""

    trial: Trial
    config: Config
    state: State = "waiting"
    starts: int = 0
    problem: str = ""
    curve: Curve = ()
    process: subprocess.Popen[bytes] = dataclasses.field(init=False)
    share: worker.Share = dataclasses.field(init=False)

    @property
    def path(self) -> Path:
        """Its directory, of which the name is the run's."""
        return Path(self.config.log_path)

    def result(self, metric: str) -> Result:
        rows = measured(self.path)
        values = [value for _, value in curve(rows, metric)]
        return Result(
            run=self.path.name,
            trial=self.trial.number,
            options=self.trial.options,
            seed=self.config.seed,
            state=self.state,
            generations=sum("time/total" in row for row in rows),
            metric=metric,
            final=values[-1] if values else math.nan,
            best=max(values, default=math.nan),
            seconds=math.fsum(row.get("time/total", 0.0) for row in rows),
            problem=self.problem,
        )


class _Sweep:
    """A sweep under way; `ask` gives the next trial, and `tell` takes what came of one."""

    def __init__(
        self,
        settings: SweepSettings,
        make: Make,
        trackers: TrackerBuilder,
        num_runs: int,
        ask: Callable[[], Trial | None],
        tell: Callable[[Trial, float, bool], None] | None,
    ) -> None:
        self._settings = settings
        self._make = make
        self._trackers = trackers
        self._num_runs = num_runs
        self._ask = ask
        self._tell = tell
        self._path = Path(settings.log_path)
        self._runs: list[_Run] = []
        self._waiting = collections.deque[_Run]()
        self._free = worker.shares(settings.workers, settings.devices)
        self._pruned = _read_pruned(self._path / PRUNED) if settings.prune != "none" else set()
        self._stopped = threading.Event()

    def run(self) -> list[Result]:
        """To the end, or to a signal."""
        self._write()
        with end_on_signals(self._stopped.set):
            try:
                self._work()
            finally:
                worker.end(run.process for run in self._in("running"))
        for run in self._in("running"):
            run.state = "interrupted"
        is_over = not self._stopped.is_set()
        results, table, said = self._write(is_over=is_over)
        if not is_over:
            raise KeyboardInterrupt(
                f"interrupted with {plural(len(self._in('complete')), 'run')} complete; give the "
                "same command again to go on"
            )
        print(f"\n{table}\n\nwritten to {self._path / 'results.md'}", flush=True)
        if said:
            print(said)
        if failed := self._in("failed"):
            first = failed[0]
            raise SweepError(
                f"{len(failed)} of {plural(len(self._runs), 'run')} failed, {first.path.name} so: "
                f"{first.problem} (all of it is in {self._output(first)})"
            )
        return results

    def _in(self, state: State) -> list[_Run]:
        return [run for run in self._runs if run.state == state]

    def _output(self, run: _Run) -> Path:
        """What its processes print."""
        return self._path / OUTPUT / f"{run.path.name}.txt"

    def _work(self) -> None:
        looked = time.monotonic()
        while not self._stopped.is_set():
            ended = [run for run in self._in("running") if run.process.poll() is not None]
            for run in ended:
                self._free.append(run.share)
                self._settle(run, worker.release(run.process))
            self._fill()
            if ended:
                self._write()
            if not self._in("running"):
                return
            if time.monotonic() - looked >= _SECONDS_BETWEEN_READINGS:
                self._look()
                looked = time.monotonic()
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _fill(self) -> None:
        """Start as many runs as there are workers."""
        while self._free and not self._stopped.is_set() and (run := self._next()):
            run.state, run.starts, run.share = "running", run.starts + 1, self._free.pop(0)
            number = len(self._runs) - len(self._waiting)
            print(f"run {number} of {self._num_runs} begins: {run.path}", flush=True)
            run.process = worker.start(run.config, run.share, self._output(run))

    def _next(self) -> _Run | None:
        """The next run that is to be started; those that are over are told of on the way."""
        while True:
            if not self._waiting:
                trial = self._ask()
                if trial is None:
                    return None
                self._waiting.extend(_runs_of(trial, self._settings, self._make))
                self._runs += self._waiting
            run = self._waiting.popleft()
            if any(other.trial.name == run.trial.name for other in self._in("pruned")):
                self._end(run, "skipped")
            elif is_complete(run.config):
                self._end(run, "complete")
            elif run.path.name in self._pruned and run.path.exists():
                self._end(run, "pruned")
            else:
                return run

    def _settle(self, run: _Run, code: int) -> None:
        """A run's process has ended."""
        if is_complete(run.config):
            self._end(run, "complete")
        elif run.path.name in self._pruned:
            self._end(run, "pruned")
        elif code < 0 and run.starts < _STARTS:
            print(f"{run.path}: its process was killed by signal {-code}; it goes on", flush=True)
            run.state = "waiting"
            self._waiting.appendleft(run)
        else:
            run.problem = self._why(run, code)
            self._end(run, "failed")

    def _why(self, run: _Run, code: int) -> str:
        """Why a run's process has ended before the run did."""
        if code < 0:
            return f"its process was killed by signal {-code}, {run.starts} times"
        if code == 0:
            return f"it ended, and {run.path} does not hold this run as this program knows it"
        return worker.last_words(self._output(run))

    def _end(self, run: _Run, state: State) -> None:
        metric, run.state = self._settings.metric, state
        result = run.result(metric)
        run.curve = curve(measured(run.path), metric)
        said = f", {metric} {result.final:.4g}" if state == "complete" else ""
        why = f": {run.problem}" if run.problem else ""
        print(f"{run.path}: {state} after {result.generations} generations{said}{why}", flush=True)
        if state == "complete" and math.isnan(result.final):
            self._refuse_metric(run)
        of_trial = [each for each in self._runs if each.trial.name == run.trial.name]
        states = {each.state for each in of_trial}
        if self._tell is not None and not states & {"waiting", "running"}:
            value = mean_of_complete([each.result(metric) for each in of_trial])
            self._tell(run.trial, value, "pruned" in states)

    def _look(self) -> None:
        """Stop what falls behind, and a sweep of which the metric is not measured."""
        rule = self._settings.prune
        running = self._in("running")
        for run in running:
            if rule == "none" and run.curve:
                continue  # It measures the metric, and nobody asks for more.
            rows = measured(run.path)
            run.curve = curve(rows, self._settings.metric)
            if rows and not run.curve:
                self._refuse_metric(run)
        for run in running if rule != "none" else ():
            # Runs of its own trial do not count.
            others = [o.curve for o in self._runs if o.trial.name != run.trial.name]
            length, at_least = run.config.num_generations, self._settings.prune_after
            name = run.path.name
            if name not in self._pruned and falls_behind(run.curve, others, rule, at_least, length):
                self._pruned.add(name)
                replace_file(self._path / PRUNED, [json.dumps(sorted(self._pruned)).encode()])
                run.process.send_signal(signal.SIGINT)

    def _refuse_metric(self, run: _Run) -> None:
        keys = dict.fromkeys(key for row in measured(run.path) for key in row)
        metric = self._settings.metric
        raise ConfigError(
            f"metric {metric!r} is not measured by {run.path}{did_you_mean(metric, keys) or '.'} "
            "What was done is kept: give the same command with another metric=... to go on"
        )

    def _write(self, *, is_over: bool = False) -> tuple[list[Result], str, str]:
        """Write what there is so far; returns the results, their table, and what trackers say."""
        results = [run.result(self._settings.metric) for run in self._runs]
        text = table(results, self._settings.metric)
        replace_file(self._path / "results.md", [text.encode(), b"\n"])
        said = self._trackers.summarise(self._path, _rows(results), is_over=is_over)
        return results, text, said


def falls_behind(
    curve: Curve, others: Sequence[Curve], rule: str, at_least: int, num_generations: int
) -> bool:
    """Whether a run should be stopped where its curve ends, by what others had come to by then.

    A run's standing at a generation is the best that it has measured until then, the first
    measurement left out: all runs begin at the same base. The median rule stops a run that is below
    the median of the others' standings at that generation (Golovin et al. 2017, Vizier). Successive
    halving (Jamieson & Talwalkar 2016; asynchronous as in Li et al. 2020) looks at two rungs, a
    ninth and a third of the way, and stops a run that is not among the best third of all that have
    come as far. Neither waits for anybody: a run is judged by those that were there before.

    Args:
        curve: of the run.
        others: of all others, those too that are over.
        rule: "median" or "halving".
        at_least: others that must have come as far.
        num_generations: of the whole run.
    """
    generation = curve[-1][0] if curve else 0
    if rule == "halving":
        rungs = [num_generations // _BEST_SHARE**power for power in (2, 1)]
        generation = max((rung for rung in rungs if 0 < rung <= generation), default=0)
    if not 0 < generation < num_generations:
        return False
    own = _standing(curve, generation)
    reached = [other for other in others if other and other[-1][0] >= generation]
    standings = [_standing(other, generation) for other in reached]
    if len(standings) < at_least:
        return False
    if rule == "median":
        return own < median(standings)
    better = sum(standing > own for standing in standings)
    return better >= max((len(standings) + 1) // _BEST_SHARE, 1)


def _standing(curve: Curve, generation: int) -> float:
    """The best of what was measured until then, but at first; lowest where nothing was."""
    measured = (value for at, value in curve if 0 < at <= generation)
    return max(measured, default=-math.inf)


def measured(log_path: Path) -> list[dict[str, float]]:
    """The metrics of a run, of one in progress too; none where they cannot be read."""
    with contextlib.suppress(HistoryError):
        return read_metrics(log_path / METRICS)
    return []


def curve(rows: Sequence[Mapping[str, float]], metric: str) -> Curve:
    """(generation, metric), where that was measured."""
    pairs = [(row.get(GENERATION, math.nan), row.get(metric, math.nan)) for row in rows]
    return [(int(g), value) for g, value in pairs if math.isfinite(g) and math.isfinite(value)]


def _rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """A row a run, with its options among its fields."""
    rows: list[dict[str, object]] = []
    for result in results:
        row = dataclasses.asdict(result)
        options = row.pop("options")
        rows.append({"run": result.run, "trial": result.trial, **options, **row})
    return rows


def table(results: Sequence[Result], metric: str) -> str:
    """A line a trial as Markdown, the best first."""
    by_trial = itertools.groupby(results, key=lambda result: result.trial)
    trials = [list(of_trial) for _, of_trial in by_trial]
    names = list(results[0].options) if results else []
    heads = [*names, f"{metric}, mean ± spread", "best", "runs", "minutes"]
    return markdown(heads, [_cells(trial_R, metric) for trial_R in sorted(trials, key=_rank)])


def mean_of_complete(results_R: Sequence[Result]) -> float:
    """Mean of the final values of runs that are complete; NaN where none is."""
    values = [result.final for result in results_R if result.state == "complete"]
    return fmean(values) if values else math.nan


def _rank(trial_R: Sequence[Result]) -> tuple[bool, float]:
    mean = mean_of_complete(trial_R)
    return math.isnan(mean), -mean


def _cells(trial_R: Sequence[Result], metric: str) -> list[str]:
    complete_R = [result for result in trial_R if result.state == "complete"]
    finals, bests = ([getattr(r, name) for r in complete_R] for name in ("final", "best"))
    scale, unit = (100, " %") if is_share(metric) else (1, "")

    def shown(value: float) -> str:
        return f"{scale * value:.1f}" if unit else f"{value:.4g}"

    spread = f" ± {shown(stdev(finals))}" if len(finals) > 1 else ""
    counts = collections.Counter(result.state for result in trial_R)
    return [
        *(_text(value) for value in trial_R[0].options.values()),
        f"{shown(fmean(finals))}{spread}{unit}" if finals else "–",
        f"{shown(max(bests))}{unit}" if bests else "–",
        ", ".join(f"{count} {state}" for state, count in counts.items()),
        f"{math.fsum(result.seconds for result in trial_R) / 60:.1f}",
    ]


def _text(value: Value) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", r"\|")


def _read_pruned(path: Path) -> set[str]:
    """Names of runs that were stopped early; none where the file is damaged."""
    try:
        found = parsed(read_file(path, LARGEST_TEXT, path.parent))
    except (OSError, ValueError):
        return set()
    return set(map(str, cast("list[object]", found))) if isinstance(found, list) else set()
