"""Soak: a run of 20,000 generations, and 100 runs one after the other, leave nothing behind.

    python -m benchmarks.soak [GENERATIONS RUNS]

Real parts throughout: the torch engine on a random model of a few thousand parameters, JSON lines,
snapshots, and the live screen on a terminal without a viewer. A generation takes some
milliseconds, so what a run adds to each of them shows.

The run is a separate process. It is sampled while it goes, half-way between two snapshots and
after a garbage collection: resident memory, objects that Python's collector knows, threads, open
file handles, child processes, files under the temporary directory, processor time. *Grown by* is
the most of the last quarter less the most of the second one; the first quarter is for what is made
once. The directory that it leaves is then read by the functions and commands that users have, and
gone on with: *resume* is from calling `train` to the next generation's line in the history, in
seconds and in processor time, which other programs on the machine do not change; beside it a run
that begins, to its first line.

The runs one after the other, each with a new engine, are a second process, sampled after each run.
"""

import asyncio
import dataclasses
import gc
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import chz
import psutil
from rich.console import Console
from typing_extensions import override

from benchmarks.harness import Row, call, report, row
from es_cookbook.runs.directory.directory import HISTORY, METRICS
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from es_cookbook.runs.tracking.live import LiveTracker
from tests.tiny_run import TinyConfig, write_tiny_model

SNAPSHOT_EVERY = 1_500
"""Chosen so that a resumed run of 20,000 has 500 steps left after the last snapshot."""
SAMPLE_EVERY = 250
RUN_GENERATIONS = 3
RESUMED = 3
"""Number of times that a run is resumed, and another begun."""
MEGABYTE = 2**20
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A process's resources at one moment; `at` counts generations, or runs."""

    at: int
    memory: int
    objects: int
    threads: int
    handles: int
    children: int
    files: int
    processor: float


def sample(at: int) -> Sample:
    """Look at this process, its temporary directory included."""
    gc.collect()
    process = psutil.Process()
    return Sample(
        at,
        process.memory_info().rss,
        len(gc.get_objects()),
        process.num_threads(),
        process.num_fds(),
        len(process.children(recursive=True)),
        sum(len(files) for _, _, files in os.walk(tempfile.gettempdir())),
        time.process_time(),
    )


_first_recorded: list[tuple[float, float]] = []
"""Wall-clock and processor time at which the history had this process's first generation."""


class _Nowhere(io.StringIO):
    """Discards everything that is written."""

    @override
    def write(self, text: str, /) -> int:
        return len(text)


class _Sampler(Tracker):
    """Writes a sample every so many generations, half-way between."""

    def __init__(self, path: Path, every: int) -> None:
        self._path, self._every = path, every

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        pass

    def recorded(self, generations: int) -> None:
        if not _first_recorded:
            _first_recorded.append((time.perf_counter(), time.process_time()))
        if generations % self._every == self._every // 2:
            with self._path.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(sample(generations))) + "\n")

    def close(self) -> None:
        pass


@chz.chz
class SampledTrackersBuilder(TrackerBuilder):
    """Builds JSONL files, the live screen on a terminal that is thrown away, and the samples."""

    samples: str = chz.field(doc="file that samples are appended to")
    every: int = chz.field(doc="generations between samples")

    def __call__(self, run: RunInfo) -> Tracker:
        """Open them all."""
        console = Console(file=_Nowhere(), force_terminal=True, width=100)
        screen = LiveTracker(run, console)
        return Trackers(
            [JsonlTrackerBuilder()(run), screen, _Sampler(Path(self.samples), self.every)]
        )


def one_run(directory: Path, name: str, generations: int, how: Mapping[str, int]) -> None:
    """Begin or continue a run in this process."""
    asyncio.run(train(_config(directory, name, generations, how)))


def _config(directory: Path, name: str, generations: int, how: Mapping[str, int]) -> TinyConfig:
    samples = str(directory / f"{name}.samples.jsonl")
    return TinyConfig(
        model_name=str(directory / "model"),
        log_path=str(directory / name),
        num_generations=generations,
        eval_every=how["eval_every"],
        snapshot_every=how["snapshot_every"],
        trackers=SampledTrackersBuilder(samples=samples, every=how["sample_every"]),
        behavior_if_log_dir_exists="resume",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Time from calling `train` to the next generation's line in the history."""

    seconds: float
    processor: float


def start(directory: Path, name: str, generations: int, how: Mapping[str, int]) -> Start:
    """Begin a run or go on with one, in this process, which must be new."""
    began, used = time.perf_counter(), time.process_time()
    one_run(directory, name, generations, how)
    seconds, processor = _first_recorded[0]
    return Start(seconds - began, processor - used)


def runs_in_a_row(directory: Path, runs: int) -> list[Sample]:
    """Run short runs in this process, each with a separate engine."""
    samples: list[Sample] = []
    for i in range(1, runs + 1):
        config = TinyConfig(
            model_name=str(directory / "model"),
            log_path=str(directory / f"run {i}"),
            num_generations=RUN_GENERATIONS,
            eval_every=2,
            snapshot_every=2,
        )
        asyncio.run(train(config))
        samples.append(sample(i))
    return samples


def alone(directory: Path, function: Callable[..., _T], *arguments: object) -> tuple[_T, float]:
    """Return its result and its seconds, in a fresh process with a separate temporary directory.

    Its output is discarded.
    """
    temporary = directory / "temporary"
    temporary.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(
        1, initializer=_prepare, initargs=(str(temporary),)
    ) as pool:
        return pool.apply(_timed, (function, *arguments))


def _prepare(temporary: str) -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.stdout = _Nowhere()


def _timed(function: Callable[..., _T], *arguments: object) -> tuple[_T, float]:
    began = time.perf_counter()
    found = function(*arguments)
    return found, time.perf_counter() - began


def grown(samples: Sequence[Sample], what: str) -> float:
    """Return the most in the last quarter less the most in the second."""
    quarter = max(1, len(samples) // 4)
    values = [getattr(sample, what) for sample in samples]
    return max(values[-quarter:]) - max(values[quarter : 2 * quarter])


def growth_rows(name: str, samples: Sequence[Sample]) -> list[Row]:
    """Return the growth of a process that should not grow."""

    def grew(what: str, words: str, at_most: float) -> Row:
        return row(f"{name}: {words} grown by", [grown(samples, what)], "", at_most=at_most)

    megabytes = grown(samples, "memory") / MEGABYTE
    return [
        row(f"{name}: resident memory grown by", [megabytes], "MB", at_most=8),
        row(f"{name}: resident memory at the end", [samples[-1].memory / MEGABYTE], "MB"),
        grew("objects", "Python objects", 1_000),
        grew("threads", "threads", 0),
        grew("handles", "file handles", 0),
        grew("children", "child processes", 0),
        grew("files", "temporary files", 0),
    ]


def slower(samples: Sequence[Sample]) -> float:
    """Return processor time of a generation in the last quarter over that in the second."""
    quarter = max(2, len(samples) // 4)

    def rate(some: Sequence[Sample]) -> float:
        return (some[-1].processor - some[0].processor) / (some[-1].at - some[0].at)

    return rate(samples[-quarter:]) / rate(samples[quarter : 2 * quarter])


def long_run_rows(directory: Path, generations: int) -> list[Row]:
    """Measure the long run, its resources, and what it left behind."""
    how = {
        "eval_every": max(1, generations // 10),
        "snapshot_every": min(SNAPSHOT_EVERY, generations // 4),
        "sample_every": min(SAMPLE_EVERY, max(2, generations // 20)),
    }
    name = f"{generations:,} generations"
    _, seconds = alone(directory, one_run, directory, "run", generations, how)
    lines = (directory / "run.samples.jsonl").read_text().splitlines()
    samples = [Sample(**json.loads(line)) for line in lines]
    run = directory / "run"
    readings: dict[str, float] = {}
    for what, reading in {
        "read_history": lambda: sum(1 for _ in read_history(run / HISTORY)),
        "read_metrics": lambda: len(read_metrics(run / METRICS)),
        "es-cookbook show": lambda: call("show", f"log_path={run}"),
        "es-cookbook report": lambda: call(
            "report", f"log_path={run}", f"output={directory / 'report.html'}"
        ),
    }.items():
        _, readings[what] = _timed(reading)
    resumed = [
        alone(directory, start, directory, "run", generations + i, how)[0]
        for i in range(1, RESUMED + 1)
    ]
    began = [alone(directory, start, directory, f"new {i}", 1, how)[0] for i in range(RESUMED)]
    return [
        row(f"{name}: all of it", [seconds], "s"),
        *growth_rows(name, samples),
        row(f"{name}: processor time of a generation, end / beginning", [slower(samples)], "x"),
        row(f"{name}: the history", [(run / HISTORY).stat().st_size / MEGABYTE], "MB"),
        *(row(f"{name}: {what}", [took], "s") for what, took in readings.items()),
        row(f"{name}: resume", [start.seconds for start in resumed], "s"),
        row(f"{name}: resume, processor time", [s.processor for s in resumed], "s", at_most=5),
        row("a new run, to its first generation", [start.seconds for start in began], "s"),
        row("a new run, processor time", [start.processor for start in began], "s"),
    ]


def many_runs_rows(directory: Path, runs: int) -> list[Row]:
    """Measure runs one after the other."""
    samples, seconds = alone(directory, runs_in_a_row, directory, runs)
    name = f"{runs} runs in one process"
    return [row(f"{name}: all of them", [seconds], "s"), *growth_rows(name, samples)]


def main(generations: int = 20_000, runs: int = 100) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tiny_model(directory / "model")
        rows = long_run_rows(directory, generations) + many_runs_rows(directory, runs)
    report("soak", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
