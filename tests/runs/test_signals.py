"""Ctrl-C and SIGTERM end a run, whatever an Env does to the event loop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.programs import num_recorded
from tests.said import after_start

ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests/data/base"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("signals")]

TO_GO_ON = "interrupted after generation 1; to go on: "
NOT_BY_ITSELF = "interrupted; it did not end by itself and was ended; to go on: "


class Run(NamedTuple):
    """A run in another process."""

    pid: int
    directory: Path

    @property
    def said(self) -> str:
        return after_start((self.directory / "errors.txt").read_text())

    def wait_until_blocked(self) -> None:
        began = time.monotonic()
        while num_recorded(self.directory / "run") < 1:
            assert time.monotonic() - began < 60, (self.directory / "errors.txt").read_text()
            time.sleep(0.01)  # Generation 1 is the one that blocks.


class Runs:
    """Runs in other processes, all at once."""

    def __init__(self, forker: subprocess.Popen[str], directory: Path) -> None:
        assert forker.stdin and forker.stdout
        self.requests, self.answers = forker.stdin, forker.stdout
        self.directory = directory

    def blocked(self, cases: Sequence[tuple[str, str]]) -> list[Run]:
        """Start a run for each (where, kind), and wait until their event loops are held."""
        directories = [self.directory / str(i) for i in range(len(cases))]
        what: list[tuple[Sequence[str], str]] = []
        for directory, (where, kind) in zip(directories, cases, strict=True):
            directory.mkdir()
            options = (
                *(f"log_path={directory / 'run'}", f"model_name={BASE}"),
                *("engine=tests.fakes:FakeEngineBuilder", "trackers=JsonlTrackerBuilder"),
                *(f"dataset.where={where}", f"dataset.kind={kind}"),
            )
            what.append((options, str(directory / "errors.txt")))
        self.requests.write(json.dumps(what) + "\n")
        self.requests.flush()
        pids = map(int, self.answers.readline().split())
        runs = [Run(*each) for each in zip(pids, directories, strict=True)]
        for run in runs:
            run.wait_until_blocked()
        time.sleep(0.3)
        return runs

    def exit_code(self) -> int:
        """Wait for the end of the next run, in the order of their start."""
        return int(self.answers.readline())


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.blocking"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        for left in (*psutil.Process(process.pid).children(recursive=True), process):
            left.kill()


@pytest.fixture
def runs(forker: subprocess.Popen[str], tmp_path: Path) -> Runs:
    return Runs(forker, tmp_path)


ENDS = [
    # What an Env blocks ends cleanly.
    ("sync", "sleep", signal.SIGINT, TO_GO_ON),
    ("async", "swallow_exceptions", signal.SIGTERM, TO_GO_ON),
    ("sync", "regular_expression", signal.SIGTERM, TO_GO_ON),
    ("task", "loop", signal.SIGINT, TO_GO_ON),
    ("sync", "swallow_everything", signal.SIGINT, TO_GO_ON),
    ("close", "lock", signal.SIGTERM, TO_GO_ON),
    # SIGTERM is enough where no signal reaches the Env.
    ("sync", "deaf", signal.SIGTERM, NOT_BY_ITSELF),
    # A KeyboardInterrupt that an Env raises is the user's.
    *((where, "interrupt", None, TO_GO_ON) for where in ("sync", "async", "group_rewards", "task")),
]


def test_the_first_signal_ends_what_an_env_blocks(runs: Runs) -> None:
    started = runs.blocked([(where, kind) for where, kind, *_ in ENDS])
    for _ in range(2):  # As `timeout` does: to the process, and to its group.
        for run, (_, _, number, _) in zip(started, ENDS, strict=True):
            if number is not None:
                os.kill(run.pid, number)
    began = time.monotonic()
    for run, (*what, says) in zip(started, ENDS, strict=True):
        assert runs.exit_code() == 130, what
        assert says in run.said and "Traceback" not in run.said, what
        assert says == NOT_BY_ITSELF or not (run.directory / "run/lock").exists(), what
    assert time.monotonic() - began < 30


OBSTINATE = [
    ("get_batch", "sleep", signal.SIGINT, 130),
    ("get_batch", "swallow_everything", signal.SIGINT, 130),
    ("sync", "deaf", signal.SIGINT, 130),
    ("async", "swallow_cancellation", signal.SIGINT, 130),
    ("group_rewards", "swallow_everything_busily", signal.SIGTERM, 130),
    ("make_envs", "finally_awaits", signal.SIGINT, 130),
    ("sync", "holds_the_interpreter", signal.SIGINT, -signal.SIGKILL),
    ("task", "wait_in_finally", signal.SIGTERM, 130),
    ("sync", "other_wakeup", signal.SIGINT, 130),
    ("get_batch", "thread", signal.SIGINT, 130),
    ("get_batch", "at_exit_deaf", signal.SIGINT, 130),
    ("get_batch", "child_and_grandchild", signal.SIGTERM, 130),
]
"""(where, kind, second signal, exit code); a sample of `python -m benchmarks.interrupts`."""


def test_the_second_signal_ends_whatever_there_is(runs: Runs) -> None:
    started = runs.blocked([(where, kind) for where, kind, *_ in OBSTINATE])
    for run in started:
        os.kill(run.pid, signal.SIGINT)
    time.sleep(1)
    for run, (*what, second, _) in zip(started, OBSTINATE, strict=True):
        assert psutil.Process(run.pid).status() != psutil.STATUS_ZOMBIE, what
        os.kill(run.pid, second)
    began = time.monotonic()
    for run, (*what, code) in zip(started, OBSTINATE, strict=True):
        assert runs.exit_code() == code, what
        assert "interrupted" in run.said, what
        assert len(list(read_history(run.directory / "run/history.jsonl"))) == 1
    assert time.monotonic() - began < 8  # Five, and the machine may be busy.
    says = [run.said for run in started[:3]]
    assert says[0].startswith(TO_GO_ON)
    assert all(each.startswith(NOT_BY_ITSELF) for each in says[1:])
    while left := [each for each in psutil.process_iter() if is_of(each, runs.directory)]:
        assert time.monotonic() - began < 12, left
        time.sleep(0.05)


def is_of(process: psutil.Process, directory: Path) -> bool:
    """Whether a run in the directory started the program."""
    try:
        return process.environ().get("ERRORS", "").startswith(str(directory))
    except psutil.Error:
        return False


def test_a_task_of_an_env_that_exits_costs_its_rollout_only(runs: Runs) -> None:
    (run,) = runs.blocked([("task", "leave")])
    assert runs.exit_code() == 0
    assert "SystemExit" not in run.said
    rows = read_metrics(run.directory / "run/metrics.jsonl")
    assert [row["rollouts/failed"] for row in rows if "rollouts/failed" in row] == [0, 1, 0]
