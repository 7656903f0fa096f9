"""A sweep: trials from a sampler, each under every seed, on workers that are never idle.

Whoever decides is here, and only here: the next run goes to the first worker that is free, a run
that falls behind is interrupted, one whose process was killed goes on, and a mistake in one is told
in the end while the others are made. A run that was stopped early is marked in `pruned.json`.
"""

import collections
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

import chz

from es_cookbook import train
from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, SweepError, did_you_mean
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.common.terminal import plural
from es_cookbook.runs.directory import CONFIG, REPORT
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.lock import RunLock
from es_cookbook.runs.report.page.writing import write_report
from es_cookbook.runs.tracking.jsonl import CORRECT
from es_cookbook.train.stopping.signals import end_on_signals
from es_cookbook.train.sweep.in_turn import is_complete
from es_cookbook.train.sweep.pruning import Curve, falls_behind
from es_cookbook.train.sweep.results import (
    Result,
    State,
    SweptRun,
    curve,
    mean_of_complete,
    measured,
    write_results,
)
from es_cookbook.train.sweep.search import (
    Listed,
    Sampler,
    Space,
    Trial,
    Value,
    at_random,
    corners,
    grid,
)
from es_cookbook.train.sweep.workers import Workers

Make: TypeAlias = Callable[[Mapping[str, Value]], train.Config]
"""The Config of a trial's options; its seed and log_path are the sweep's to set."""
SamplerName: TypeAlias = Literal["grid", "random", "optuna"]
Prune: TypeAlias = Literal["none", "median", "halving"]
PRUNED = "pruned.json"
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_BETWEEN_READINGS = 0.5
_STARTS = 3
"""Of a run whose process is killed again and again."""


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


def sweep(settings: SweepSettings, make: Make, space: Space) -> list[Result]:
    """Run every trial under every seed, what is complete already excepted.

    Results are written to `results.parquet` and `results.md` in `settings.log_path` whenever a run
    has ended, and a report of all runs, `report.html`, in the end.

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
    for trial in trials:
        for run in _runs_of(trial, settings, make):
            config_to_json(run.config)
    log_path = Path(settings.log_path)
    if (log_path / CONFIG).exists():
        raise ConfigError(f"log_path {log_path} holds a run; a sweep has a directory of its own")
    try:
        log_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", log_path, error, needed=4096) from error
    lock = RunLock(log_path)
    count = settings.trials if settings.sampler == "optuna" else len(trials)
    try:
        sampler = _sampler(settings, space, trials)
        return _Sweep(settings, make, sampler, count * len(settings.seeds)).run()
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


def _sampler(settings: SweepSettings, space: Space, trials: Sequence[Trial]) -> Sampler:
    if settings.sampler != "optuna":
        return Listed(trials)
    from es_cookbook.train.sweep.optuna_sampler import OptunaSampler

    path, seed = Path(settings.log_path), settings.sampler_seed
    return OptunaSampler(space, settings.trials, seed, settings.metric, path)


def _runs_of(trial: Trial, settings: SweepSettings, make: Make) -> Iterator[SweptRun]:
    config = make(trial.options)
    for seed in settings.seeds:
        log_path = str(Path(settings.log_path) / f"{trial.name}-seed{seed}")
        yield SweptRun(trial, chz.replace(config, seed=seed, log_path=log_path))


class _Sweep:
    """A sweep under way."""

    def __init__(
        self, settings: SweepSettings, make: Make, sampler: Sampler, num_runs: int
    ) -> None:
        self._settings = settings
        self._make = make
        self._sampler = sampler
        self._path = Path(settings.log_path)
        self._num_runs = num_runs
        self._runs: dict[str, SweptRun] = {}
        self._curves: dict[str, Curve] = {}
        self._waiting = collections.deque[SweptRun]()
        self._pruned = _read_pruned(self._path / PRUNED) if settings.prune != "none" else set()
        self._workers = Workers(settings.workers, settings.devices, self._path)
        self._stopped = False

    def run(self) -> list[Result]:
        """To the end, or to a signal."""
        self._write()
        with end_on_signals(self._stop):
            try:
                self._work()
            finally:
                self._workers.close()
        for run in self._runs.values():
            run.state = "interrupted" if run.state == "running" else run.state
        results, table = self._write()
        complete = sum(run.state == "complete" for run in self._runs.values())
        if self._stopped:
            raise KeyboardInterrupt(
                f"interrupted with {plural(complete, 'run')} complete; give the same command again "
                "to go on"
            )
        print(f"\n{table}\n\nwritten to {self._path / 'results.md'} and .parquet", flush=True)
        if paths := [self._runs[result.run].path for result in results if result.generations]:
            print(f"all runs are shown in {write_report(paths, self._path / REPORT)}")
        if failed := [run for run in self._runs.values() if run.state == "failed"]:
            first = failed[0]
            raise SweepError(
                f"{len(failed)} of {plural(len(self._runs), 'run')} failed, {first.path.name} so: "
                f"{first.problem} (all of it is in {self._workers.output(first.path.name)})"
            )
        return results

    def _stop(self) -> None:
        self._stopped = True

    def _work(self) -> None:
        looked = time.monotonic()
        while not self._stopped:
            ended = self._workers.ended()
            for name, code in ended:
                self._settle(self._runs[name], code)
            self._fill()
            if ended:
                self._write()
            if not self._workers.running:
                return
            if time.monotonic() - looked >= _SECONDS_BETWEEN_READINGS:
                self._look()
                looked = time.monotonic()
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _fill(self) -> None:
        """Start runs in all slots that are free."""
        while self._workers.has_room and not self._stopped and (run := self._next()):
            run.state, run.starts = "running", run.starts + 1
            number = len(self._runs) - len(self._waiting)
            print(f"run {number} of {self._num_runs} begins: {run.path}", flush=True)
            self._workers.start(run.path.name, run.config)

    def _next(self) -> SweptRun | None:
        """The next run that is to be started; those that are over are told of on the way."""
        while True:
            if not self._waiting and not self._ask():
                return None
            run = self._waiting.popleft()
            if run.trial.name in self._trials_pruned():
                self._end(run, "skipped")
            elif is_complete(run.config):
                self._end(run, "complete")
            elif run.path.name in self._pruned and run.path.exists():
                self._end(run, "pruned")
            else:
                return run

    def _ask(self) -> bool:
        """Queue the runs of the sampler's next trial; whether there is one."""
        trial = self._sampler.ask()
        if trial is None:
            return False
        for run in _runs_of(trial, self._settings, self._make):
            self._runs[run.path.name] = run
            self._waiting.append(run)
        return True

    def _settle(self, run: SweptRun, code: int) -> None:
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

    def _why(self, run: SweptRun, code: int) -> str:
        """Why a run's process has ended before the run did."""
        if code < 0:
            return f"its process was killed by signal {-code}, {run.starts} times"
        if code == 0:
            return f"it ended, and {run.path} does not hold this run as this program knows it"
        return self._workers.last_words(run.path.name)

    def _end(self, run: SweptRun, state: State) -> None:
        run.state = state
        result = run.result(self._settings.metric)
        self._curves[run.path.name] = curve(measured(run.path), self._settings.metric)
        said = f", {self._settings.metric} {result.final:.4g}" if state == "complete" else ""
        why = f": {run.problem}" if run.problem else ""
        print(f"{run.path}: {state} after {result.generations} generations{said}{why}", flush=True)
        if state == "complete" and math.isnan(result.final):
            self._refuse_metric(run)
        of_trial = [each for each in self._runs.values() if each.trial.name == run.trial.name]
        if all(each.state not in ("waiting", "running") for each in of_trial):
            value = mean_of_complete([each.result(self._settings.metric) for each in of_trial])
            is_pruned = any(each.state == "pruned" for each in of_trial)
            self._sampler.tell(run.trial, value, is_pruned)

    def _look(self) -> None:
        """Stop what falls behind, and a sweep of which the metric is not measured."""
        running = [self._runs[name] for name in self._workers.running]
        for run in running:
            if self._settings.prune == "none" and self._curves.get(run.path.name):
                continue  # It measures the metric, and nobody asks for more.
            rows = measured(run.path)
            self._curves[run.path.name] = curve(rows, self._settings.metric)
            if rows and not self._curves[run.path.name]:
                self._refuse_metric(run)
        for run in running:
            if run.path.name not in self._pruned and self._falls_behind(run):
                self._pruned.add(run.path.name)
                replace_file(self._path / PRUNED, [json.dumps(sorted(self._pruned)).encode()])
                self._workers.interrupt(run.path.name)

    def _falls_behind(self, run: SweptRun) -> bool:
        """Whether it is to be stopped early; runs of its own trial do not count."""
        rule, at_least = self._settings.prune, self._settings.prune_after
        others = [
            found
            for name, found in self._curves.items()
            if self._runs[name].trial.name != run.trial.name
        ]
        length = run.config.num_generations
        return rule != "none" and falls_behind(
            self._curves[run.path.name], others, rule, at_least, length
        )

    def _refuse_metric(self, run: SweptRun) -> None:
        keys = dict.fromkeys(key for row in measured(run.path) for key in row)
        metric = self._settings.metric
        raise ConfigError(
            f"metric {metric!r} is not measured by {run.path}{did_you_mean(metric, keys) or '.'} "
            "What was done is kept: give the same command with another metric=... to go on"
        )

    def _trials_pruned(self) -> set[str]:
        return {run.trial.name for run in self._runs.values() if run.state == "pruned"}

    def _write(self) -> tuple[list[Result], str]:
        """Write what there is so far; returns the results and their table."""
        results = [run.result(self._settings.metric) for run in self._runs.values()]
        return results, write_results(self._path, results, self._settings.metric)


def _read_pruned(path: Path) -> set[str]:
    """Names of runs that were stopped early; none where the file is damaged."""
    try:
        found = parsed(read_file(path, LARGEST_TEXT, path.parent))
    except (OSError, ValueError):
        return set()
    return set(map(str, cast("list[object]", found))) if isinstance(found, list) else set()
