"""One writer a run directory: real processes, one of them killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.runs.directory.directory import LOCK, RunLock, writer_of

ROOT = Path(__file__).parents[3]

HOLDER = """
import sys
from pathlib import Path
from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.runs.directory.directory import RunLock
try:
    lock = RunLock(Path(sys.argv[1]))
except RunDirectoryError as error:
    print(error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
    lock.release()
"""


def start(directory: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def holder(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the lock until its standard input ends."""
    with start(directory) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_the_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(RunDirectoryError) as caught:
            RunLock(tmp_path)
        assert writer_of(tmp_path) == f"process {process.pid}"
        assert str(caught.value) == (
            f"log_path {tmp_path} is being written by process {process.pid}; wait until that run "
            "has ended, or stop it"
        )
        process.communicate("")
    assert not (tmp_path / LOCK).exists(), "a normal end leaves nothing"
    RunLock(tmp_path).release()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK).exists() and writer_of(tmp_path) is None
    lock = RunLock(tmp_path)
    assert (tmp_path / LOCK).read_text() == str(os.getpid())
    lock.release()
