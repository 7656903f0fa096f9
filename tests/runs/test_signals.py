"""Ctrl-C and SIGTERM end a run, whatever an Env does."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from es_cookbook.runs.history.store import read_history
from tests.programs import Programs
from tests.said import after_start
from tests.tiny_run import BASE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("signals")]

TO_GO_ON = "interrupted after generation 1; to go on: "
NOT_BY_ITSELF = "interrupted; it did not end by itself and was ended; to go on: "


class Blocked:
    """A run in another process, in which an Env has begun to block."""

    def __init__(self, programs: Programs, directory: Path, kind: str) -> None:
        self.programs, self.log_path = programs, directory / "run"
        self.errors, marker = directory / "errors.txt", directory / "blocked"
        options = (
            *(f"log_path={self.log_path}", f"model_name={BASE}", f"dataset.kind={kind}"),
            *("engine=tests.fakes:FakeEngineBuilder", "trackers=JsonlTrackerBuilder"),
        )
        self.pid = programs.start(
            ["-m", "tests.blocking", *options],
            [os.devnull, os.devnull, self.errors],
            environment={"BLOCKED": str(marker)},
        )
        self.wait_for(marker.exists)
        time.sleep(0.2)

    def wait_for(self, condition: Callable[[], object]) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < 120, self.errors.read_text()
            time.sleep(0.01)

    def assert_ends(self, says: str) -> None:
        """It ends with 130, this sentence, and a history that is whole."""
        code, said = self.programs.exit_code(), after_start(self.errors.read_text())
        assert code == 130, said
        assert says in said and "Traceback" not in said
        assert len(list(read_history(self.log_path / "history.jsonl"))) == 1


@pytest.fixture
def blocked(programs: Programs, tmp_path: Path) -> Callable[[str], Blocked]:
    return lambda kind: Blocked(programs, tmp_path, kind)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_run_cleanly(
    blocked: Callable[[str], Blocked], number: signal.Signals
) -> None:
    run = blocked("async_sleep")
    for _ in range(2):  # As `timeout` does: to the process, and to its group.
        os.kill(run.pid, number)
    run.assert_ends(TO_GO_ON)
    assert not (run.log_path / "lock").exists()


@pytest.mark.parametrize("kind", ["native", "loop", "swallow_cancellation", "child"])
def test_the_second_signal_ends_the_process_and_its_children(
    blocked: Callable[[str], Blocked], kind: str
) -> None:
    run = blocked(kind)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) == (kind == "child")
    os.kill(run.pid, signal.SIGINT)
    time.sleep(1)
    assert psutil.Process(run.pid).status() != psutil.STATUS_ZOMBIE, run.errors.read_text()
    os.kill(run.pid, signal.SIGINT)
    run.assert_ends(NOT_BY_ITSELF)
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_sigterm_ends_a_process_that_is_blocked(blocked: Callable[[str], Blocked]) -> None:
    run = blocked("loop")
    os.kill(run.pid, signal.SIGTERM)
    run.assert_ends(NOT_BY_ITSELF)
