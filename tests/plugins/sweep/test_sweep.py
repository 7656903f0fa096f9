"""Sweeps on several workers: interruptions, failures and continuation."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import chz
import pandas
import psutil
import pytest

from es_cookbook import ES, Config
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, RunDirectoryError, SweepError
from es_cookbook.plugins.report.frames import frames
from es_cookbook.plugins.sweep.loop import SweepSettings, sweep
from es_cookbook.plugins.sweep.search import Range, Value, Values
from es_cookbook.runs.directory.directory import RunLock
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.fakes import FakeEngineBuilder
from tests.tiny_run import tiny

QUICK = pytest.mark.usefixtures("quick_python")
SIGMAS = {"sigma": Values((0.1, 0.2))}


def make(
    options: Mapping[str, Value], generations: int = 2, held_by: Mapping[float, Path] | None = None
) -> Config:
    """A trial's Config; of a σ with a file in `held_by`, generation 2 waits until that is gone."""
    sigma = options.get("sigma", 0.1)
    held = str((held_by or {}).get(float(sigma), ""))
    return tiny(
        Path(),
        engine=FakeEngineBuilder(capacity=3, held_by=held),
        optimizer=ES(population_size=4, sigma=float(sigma), learning_rate=0.05),
        num_generations=generations,
        eval_every=50,
        trackers=TrackersBuilder(live=None),
    )


def settings(tmp_path: Path, **fields: object) -> SweepSettings:
    return SweepSettings(log_path=str(tmp_path / "sweep"), **fields)


@QUICK
@pytest.mark.slow
def test_every_trial_runs_once_under_every_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how, space = settings(tmp_path, seeds=(0, 3), workers=2), {"sigma": Values((0.2,))}
    results = sweep(how, make, space)
    assert [(r.run, r.options, r.seed, r.state) for r in results] == [
        ("sigma0.2-seed0", {"sigma": 0.2}, 0, "complete"),
        ("sigma0.2-seed3", {"sigma": 0.2}, 3, "complete"),
    ]
    path = tmp_path / "sweep"
    table = frames(path)
    assert set(table["seed"]) == {0, 3}
    said = capsys.readouterr().out
    assert "run 2 of 2 begins" in said
    assert (path / "report.html").stat().st_size > 10_000
    written = (path / "results.md").read_text()
    assert written in said
    lines = written.splitlines()
    assert lines[0].startswith("| sigma | test/env/all/correct, mean ± spread | runs |")
    assert "| 2 complete |" in lines[2]
    parquet = pandas.read_parquet(path / "results.parquet")
    assert list(parquet["final"]) == [result.final for result in results]
    assert list(parquet["sigma"]) == [0.2, 0.2]
    histories = sorted(path.glob("*/history.jsonl"))
    changed = [history.stat().st_mtime_ns for history in histories]
    assert sweep(how, make, space) == results
    assert [history.stat().st_mtime_ns for history in histories] == changed
    assert "begins" not in capsys.readouterr().out


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a worker of a sweep: other tests leave processes as well, also ended ones."""
    with contextlib.suppress(psutil.Error):
        return "es_cookbook.plugins.sweep.worker" in process.cmdline()
    return False


def in_background(
    act: Callable[[psutil.Process], None], tmp_path: Path, run: str
) -> threading.Thread:
    """Do something to a run's process once it has recorded generations."""

    def watch() -> None:
        history = tmp_path / "sweep" / run / "history.jsonl"
        while not history.exists() or len(list(read_history(history))) < 2:
            time.sleep(0.02)
        (worker,) = filter(is_worker, psutil.Process().children())
        act(worker)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_run_whose_process_is_killed_is_reported_and_continues_later(tmp_path: Path) -> None:
    seen: list[tuple[list[int], str]] = []
    held = tmp_path / "held"
    held.touch()

    def kill(worker: psutil.Process) -> None:
        seen.append((worker.cpu_affinity() or [], worker.environ()["OMP_NUM_THREADS"]))
        worker.send_signal(signal.SIGKILL)
        held.unlink()

    thread = in_background(kill, tmp_path, "run-seed0")
    long = functools.partial(make, generations=4, held_by={0.1: held})
    with pytest.raises(SweepError, match="run-seed0 so: its process was ended by SIGKILL"):
        sweep(settings(tmp_path), long, {})
    thread.join()
    (result,) = sweep(settings(tmp_path), long, {})
    assert (result.state, result.generations) == ("complete", 4)
    cores, threads = seen[0]
    assert cores == sorted(os.sched_getaffinity(0)), "one worker has them all"
    assert int(threads) <= len(cores)


@QUICK
@pytest.mark.slow
def test_an_interrupted_sweep_leaves_nothing_running_and_goes_on(tmp_path: Path) -> None:
    workers: list[psutil.Process] = []

    def interrupt(worker: psutil.Process) -> None:
        workers.append(worker)
        os.kill(os.getpid(), signal.SIGINT)

    held = tmp_path / "held"
    held.touch()
    thread = in_background(interrupt, tmp_path, "run-seed0")
    long = functools.partial(make, generations=4, held_by={0.1: held})
    with pytest.raises(KeyboardInterrupt, match="with 0 runs complete; give the same command"):
        sweep(settings(tmp_path, seeds=(0, 1)), long, {})
    thread.join()
    assert not workers[0].is_running()
    parquet = pandas.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert list(parquet["state"]) == ["interrupted", "waiting"]
    assert list(parquet["generations"]) == [2, 0]
    held.unlink()
    results = sweep(settings(tmp_path, seeds=(0, 1)), long, {})
    assert [(result.state, result.generations) for result in results] == [("complete", 4)] * 2


@QUICK
@pytest.mark.slow
def test_a_failed_run_is_reported_and_others_complete(tmp_path: Path) -> None:
    def without_model(options: Mapping[str, Value]) -> Config:
        config = make(options)
        return (
            chz.replace(config, model_name="no/such/model") if options["sigma"] == 0.1 else config
        )

    with pytest.raises(SweepError, match=r"1 of 2 runs failed, sigma0.1-seed0 so: .*no/such/model"):
        sweep(settings(tmp_path, workers=2), without_model, SIGMAS)
    parquet = pandas.read_parquet(tmp_path / "sweep" / "results.parquet")
    assert list(parquet["state"]) == ["failed", "complete"]
    assert "no/such/model" in parquet["problem"][0]


@QUICK
@pytest.mark.slow
def test_optuna_continues_with_recorded_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"sigma": Range(0.01, 1.0, log=True)}
    how = settings(tmp_path, sampler="optuna", trials=2, metric="optimizer/sigma", workers=2)
    first = sweep(how, make, space)
    assert [result.state for result in first] == ["complete"] * 2
    more = sweep(chz.replace(how, trials=3), make, space)
    assert more[:2] == first
    assert len({result.options["sigma"] for result in more}) == 3
    assert len(list((tmp_path / "sweep").glob("*/history.jsonl"))) == 3
    journal = (tmp_path / "sweep" / "optuna.jsonl").read_text()
    assert all(f'"values":[{result.final}]' in journal for result in more)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    lock = RunLock(tmp_path / "sweep")
    with pytest.raises(RunDirectoryError, match="is being written by process"):
        sweep(settings(tmp_path), make, SIGMAS)
    lock.release()
    (tmp_path / "sweep" / "output").rmdir()
    (tmp_path / "sweep" / "output").touch()
    with pytest.raises(RunDirectoryError, match=f"cannot make {tmp_path}/sweep/output: File exi"):
        sweep(settings(tmp_path), make, SIGMAS)
    (tmp_path / "sweep" / "config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="holds a run; a sweep needs a new directory"):
        sweep(settings(tmp_path), make, SIGMAS)


@QUICK
@pytest.mark.slow
def test_a_metric_that_is_not_measured_stops_the_sweep_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not measured by .*; did you mean 'reward/mean'"):
        sweep(settings(tmp_path, metric="reward/mena"), make, {})


def worker_of(config: Config) -> "subprocess.Popen[bytes]":
    """A sweep's worker, which has been given this run."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "es_cookbook.plugins.sweep.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert worker.stdin
    worker.stdin.write(json.dumps(json.loads(config_to_json(config))).encode() + b"\n")
    worker.stdin.flush()
    return worker


@pytest.mark.slow
def test_a_run_ends_with_the_process_of_its_sweep(tmp_path: Path) -> None:
    config = chz.replace(make({}, generations=10_000), log_path=str(tmp_path / "run"))
    worker = worker_of(config)
    assert worker.stdin and worker.stderr
    history = tmp_path / "run" / "history.jsonl"
    while worker.poll() is None and len(list(read_history(history))) < 2:
        time.sleep(0.02)
    worker.stdin.close()
    assert worker.wait(30) == 130
    assert b"interrupted after generation" in worker.stderr.read()
    assert len(list(read_history(history))) < 10_000
