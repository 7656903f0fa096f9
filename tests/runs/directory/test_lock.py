"""One writer a run directory: real processes, one of them killed."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.runs.directory.lock import LOCK, RunLock

ROOT = Path(__file__).parents[3]

HOLDER = """
import os, sys, time
from pathlib import Path
from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.runs.directory.lock import RunLock
try:
    lock = RunLock(Path(sys.argv[1]))
except RunDirectoryError as error:
    print(error, flush=True)
else:
    if sys.argv[2:] == ["forks"] and not os.fork():
        print(os.getpid(), flush=True)
        time.sleep(60)
    if sys.argv[2:] == ["forks"]:
        time.sleep(60)
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
        owner = json.loads((tmp_path / LOCK).read_text())
        assert owner["pid"] == process.pid
        assert str(caught.value) == (
            f"log_path {tmp_path} is being written by process {process.pid} on {owner['host']} "
            f"since {owner['since']}; wait until that run has ended, or stop it"
        )
        process.communicate("")
    assert not (tmp_path / LOCK).exists(), "a normal end leaves nothing"
    RunLock(tmp_path).release()


def test_a_killed_owner_is_taken_over_and_the_log_says_from_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK).exists()
    with caplog.at_level(logging.INFO):
        lock = RunLock(tmp_path)
    assert f"taken over from process {process.pid} on" in caplog.text
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_process_forked_off_does_not_hold_it_when_its_parent_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, "forks") as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with pytest.raises(RunDirectoryError, match=f"process {process.pid} on"):
            RunLock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        RunLock(tmp_path).release()
        os.kill(child, signal.SIGKILL)


def test_of_many_that_start_at_once_one_gets_it(tmp_path: Path) -> None:
    for _ in range(3):
        (tmp_path / LOCK).write_text("")  # Left by somebody killed at the worst moment.
        processes = [start(tmp_path) for _ in range(4)]
        said = [process.stdout.readline() for process in processes if process.stdout is not None]
        assert said.count("held\n") == 1
        assert sum("is being written by" in line for line in said) == 3
        for process in processes:
            process.communicate("")


def test_a_lock_that_is_let_go_of_while_others_open_it_is_never_held_twice(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    opened = os.open(tmp_path / LOCK, os.O_RDWR)  # What a second one does just before the release.
    lock.release()
    again = RunLock(tmp_path)
    assert os.fstat(opened).st_ino != (tmp_path / LOCK).stat().st_ino
    with pytest.raises(RunDirectoryError, match="is being written by"):
        RunLock(tmp_path)
    again.release()
    os.close(opened)


def leave(directory: Path, **fields: object) -> None:
    left = {"host": "there", "boot": "b", "pid": 7, "since": "2026-01-02 03:04:05+00:00"}
    left |= {"began": "9"}
    (directory / LOCK).write_text(json.dumps(left | fields))


def test_a_lock_of_another_machine_is_respected_until_it_is_deleted(tmp_path: Path) -> None:
    leave(tmp_path)
    with pytest.raises(RunDirectoryError) as caught:
        RunLock(tmp_path)
    assert str(caught.value) == (
        f"log_path {tmp_path} is being written by process 7 on there since "
        "2026-01-02 03:04:05+00:00; another machine, so it cannot be seen from here whether that "
        f"run is over; if it is, delete {tmp_path / LOCK}"
    )
    assert "there" in (tmp_path / LOCK).read_text()
    (tmp_path / LOCK).unlink()
    RunLock(tmp_path).release()


def test_a_container_of_this_machine_is_this_machine(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        pytest.skip("boot ids are Linux's, and this is another system")
    leave(tmp_path, boot=boot.read_text().strip())
    RunLock(tmp_path).release()


def test_where_the_file_system_knows_no_locks_the_file_is_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unknown)  # No such file system can be had here.
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirectoryError, match=rf"process {os.getpid()} .* delete .*{LOCK}"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()
