"""Ctrl-C and SIGTERM end a run, whatever an Env does to the event loop."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.said import after_start

ROOT = Path(__file__).parents[3]
BASE = ROOT / "tests/data/base"
pytestmark = pytest.mark.slow


def options_of(directory: Path, where: str, kind: str) -> Sequence[str]:
    """Of a run that blocks."""
    return (
        *(f"log_path={directory / 'run'}", f"model_name={BASE}"),
        *("engine=tests.fakes:FakeEngineBuilder", "trackers=JsonlTrackerBuilder"),
        *(f"dataset.where={where}", f"dataset.kind={kind}"),
    )


def wait_until_blocked(directory: Path) -> None:
    history = directory / "run/history.jsonl"
    began = time.monotonic()
    while not history.exists() or history.read_bytes().count(b"\n") < 2:
        assert time.monotonic() - began < 60, (directory / "errors.txt").read_text()
        time.sleep(0.01)  # Generation 1 is the one that blocks.
    time.sleep(0.3)


class Runs:
    """Runs in other processes, one at a time."""

    def __init__(self, forker: subprocess.Popen[str], directory: Path) -> None:
        self.forker = forker
        self.directory = directory
        self.began = math.inf

    def blocked(self, where: str, kind: str, *options: str) -> int:
        """Start one and wait until its event loop is held; gives its process id."""
        assert self.forker.stdin and self.forker.stdout
        run = (*options_of(self.directory, where, kind), *options)
        self.forker.stdin.write(json.dumps([[run, str(self.directory / "errors.txt")]]) + "\n")
        self.forker.stdin.flush()
        pid = int(self.forker.stdout.readline())
        wait_until_blocked(self.directory)
        return pid

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal."""
        self.began = time.monotonic()
        os.kill(pid, number)

    def ended(self, within: float, code: int = 130) -> str:
        """Wait for the end of a run; what it said, and all that it printed to stdout is nothing."""
        assert self.forker.stdout
        assert self.forker.stdout.readline() == f"{code}\n"
        assert time.monotonic() - self.began < within
        return after_start((self.directory / "errors.txt").read_text())


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("sync", "sleep"),
        ("async", "swallow_exceptions"),
        ("sync", "regular_expression"),
        ("task", "loop"),
        ("sync", "swallow_everything"),
        ("close", "lock"),
    ],
)
def test_the_first_signal_ends_cleanly_what_an_env_blocks(
    runs: Runs, number: signal.Signals, where: str, kind: str
) -> None:
    runs.send(runs.blocked(where, kind), number)
    said = runs.ended(within=30)
    assert "interrupted after generation 1; to go on, run the same command with " in said
    assert "Traceback" not in said
    assert not (runs.directory / "run/lock").exists()


@pytest.mark.parametrize("where", ["sync", "async", "group_rewards", "task"])
def test_a_keyboard_interrupt_that_an_env_raises_is_the_user_s(runs: Runs, where: str) -> None:
    runs.blocked(where, "interrupt")
    runs.began = time.monotonic()
    said = runs.ended(within=30)
    assert said.startswith("interrupted after generation 1; to go on, run the same command with ")
    assert not (runs.directory / "run/lock").exists()


@pytest.mark.parametrize(
    ("where", "kind", "says"),
    [
        ("get_batch", "sleep", "interrupted after generation 1; to go on, run the same command "),
        ("get_batch", "swallow_everything", "interrupted; it did not end by itself"),
        ("sync", "deaf", "interrupted; it did not end by itself"),
    ],
)
def test_the_second_signal_ends_at_once_what_the_first_does_not(
    runs: Runs, where: str, kind: str, says: str
) -> None:
    pid = runs.blocked(where, kind)
    os.kill(pid, signal.SIGINT)
    time.sleep(1)
    os.kill(pid, 0)
    runs.send(pid, signal.SIGINT)
    assert runs.ended(within=6).startswith(says)


OBSTINATE = [
    ("async", "swallow_cancellation", signal.SIGINT, [130]),
    ("group_rewards", "swallow_everything_busily", signal.SIGTERM, [130]),
    ("make_envs", "finally_awaits", signal.SIGINT, [130]),
    ("sync", "holds_the_interpreter", signal.SIGINT, [-signal.SIGKILL]),
    ("task", "wait_in_finally", signal.SIGTERM, [130]),
    ("sync", "other_wakeup", signal.SIGINT, [130]),
    ("get_batch", "thread", signal.SIGINT, [130]),
    ("get_batch", "at_exit_deaf", signal.SIGINT, [130]),
    ("get_batch", "child_and_grandchild", signal.SIGTERM, [130]),
]


def test_the_second_signal_ends_whatever_there_is(
    forker: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A sample of `python -m benchmarks.interrupts`, all at once."""
    directories = [tmp_path / str(i) for i in range(len(OBSTINATE))]
    for directory in directories:
        directory.mkdir()
    what = [
        [options_of(directory, where, kind), str(directory / "errors.txt")]
        for directory, (where, kind, *_) in zip(directories, OBSTINATE, strict=True)
    ]
    assert forker.stdin and forker.stdout
    forker.stdin.write(json.dumps(what) + "\n")
    forker.stdin.flush()
    pids = list(map(int, forker.stdout.readline().split()))
    for directory in directories:
        wait_until_blocked(directory)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    for pid, (_, _, second, _) in zip(pids, OBSTINATE, strict=True):
        os.kill(pid, second)
    began = time.monotonic()
    for directory, (where, kind, _, codes) in zip(directories, OBSTINATE, strict=True):
        assert int(forker.stdout.readline()) in codes, (where, kind)
        assert "interrupted" in (directory / "errors.txt").read_text(), (where, kind)
        assert len(list(read_history(directory / "run/history.jsonl"))) == 1
    assert time.monotonic() - began < 8  # Five, and the machine may be busy.
    while left := [each for each in psutil.process_iter() if is_of(each, tmp_path)]:
        assert time.monotonic() - began < 12, left
        time.sleep(0.05)


def is_of(process: psutil.Process, directory: Path) -> bool:
    """Whether a run in the directory started the program."""
    try:
        return process.environ().get("ERRORS", "").startswith(str(directory))
    except psutil.Error:
        return False


def test_sigterm_is_enough_where_no_signal_reaches_the_env(runs: Runs) -> None:
    runs.send(runs.blocked("sync", "deaf"), signal.SIGTERM)
    assert runs.ended(within=30).startswith("interrupted; it did not end by itself")


def test_a_task_of_an_env_that_exits_costs_its_rollout_only(runs: Runs) -> None:
    runs.blocked("task", "leave")
    assert "SystemExit" not in runs.ended(within=30, code=0)
    rows = read_metrics(runs.directory / "run/metrics.jsonl")
    assert [row["rollouts/failed"] for row in rows if "rollouts/failed" in row] == [0, 1, 0]
