"""A disk that is full, read-only or slow: the run stops with one sentence, and goes on exactly.

The disks are real ones of a few pages where mounting is allowed; file sizes are limited by the
kernel everywhere.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import run as run_config
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.limits import largest_file
from tests.plugins.branches.test_fork import config, files, same_run
from tests.tiny_run import TinyConfig

ROOT = Path(__file__).parents[1]
PAGE = 4096
PAGES = 128


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unbroken") / "run"
    run_config(config(path, num_generations=40))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of `PAGES` pages."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={PAGES * PAGE}", "none", str(path)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here; see the test with a limit on file sizes")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path, free_pages: int) -> None:
    """Leave so many pages."""
    status = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes((status.f_bavail - free_pages) * PAGE))


def stopped(log_path: Path, **fields: Any) -> str:
    with pytest.raises(RunDirectoryError) as caught:
        run_config(config(log_path, num_generations=40, **fields))
    return str(caught.value)


def test_a_full_disk_stops_a_run_at_any_file_and_it_goes_on_when_there_is_room(
    disk: Path, unbroken: Path
) -> None:
    hit: set[str] = set()
    for free_pages in range(16):
        log_path = disk / "run"
        fill(disk, free_pages)
        sentence = stopped(log_path)
        found = re.fullmatch(
            rf"cannot (write|append to) {log_path}/(\S+): No space left on device; free at least "
            rf"(\d+) bytes on the disk of {log_path}(; everything before it is safe)?",
            sentence,
        )
        assert found, sentence
        assert int(found[3]) > 0
        hit.add(found[2])
        if log_path.exists():
            assert not list(log_path.glob("*.partial")) and not (log_path / "lock").exists()
        recorded = list(read_history(log_path / "history.jsonl"))
        assert recorded == list(read_history(unbroken / "history.jsonl"))[: len(recorded)]
        (disk / "ballast").unlink()
        run_config(config(log_path, num_generations=40, behavior_if_log_dir_exists="resume"))
        same_run(log_path, unbroken)
        for path in log_path.iterdir():
            path.unlink()
        log_path.rmdir()
    written = {"lock", "config.json", "history.jsonl", "metrics.jsonl", "rollouts.jsonl"}
    assert written == hit


def test_a_disk_that_became_read_only_is_named_and_what_is_there_can_be_read(disk: Path) -> None:
    run = disk / "run"
    run_config(config(run, num_generations=3))
    before = files(run)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert stopped(run, behavior_if_log_dir_exists="resume") == (
        f"cannot write {run / 'lock'}: Read-only file system; make {run} writable"
    )
    assert stopped(disk / "new").startswith(
        f"log_path {disk / 'new'} cannot be used as a directory"
    )
    assert len(list(read_history(run / "history.jsonl"))) == 3
    assert files(run) == before


CASES = {"config.json": 700, "rollouts.jsonl": 2_500, "history.jsonl": 6_000}
"""The file that hits a limit first -> bytes."""


def limited_config(log_path: Path, file_name: str) -> TinyConfig:
    """A run in which this file grows fastest."""
    made = config(log_path, num_generations=10, behavior_if_log_dir_exists="resume")
    if file_name == "rollouts.jsonl":
        return chz.replace(made, trackers=JsonlTrackerBuilder(rollouts_per_generation=8))
    if file_name != "history.jsonl":
        return made
    return chz.replace(
        made,
        optimizer=ES(population_size=32, sigma=0.1, learning_rate=0.05),
        trackers=JsonlTrackerBuilder(rollouts_per_generation=0),
    )


def test_a_limit_on_file_sizes_stops_a_run_wherever_it_hits_and_it_goes_on_without(
    tmp_path: Path,
) -> None:
    for file_name, limit in CASES.items():
        run = tmp_path / file_name
        with largest_file(limit), pytest.raises(RunDirectoryError) as caught:
            run_config(limited_config(run, file_name))
        assert re.fullmatch(
            rf"cannot (write|append to) {run}/{file_name}: File too large; raise the limit on a "
            r"file's size \(ulimit -f\) by at least \d+ bytes(; everything before it is safe)?",
            str(caught.value),
        )
        history = files(run).get("history.jsonl", b"") if run.exists() else b""
        assert len(history) <= limit and history.count(b"\n") == len(history.splitlines())
        whole = chz.replace(limited_config(run, file_name), log_path=str(tmp_path / "whole"))
        run_config(chz.replace(whole, behavior_if_log_dir_exists="delete"))
        run_config(limited_config(run, file_name))
        same_run(run, tmp_path / "whole")
        assert (run / "history.jsonl").read_bytes().startswith(history)
