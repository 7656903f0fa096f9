"""Runs are listed as they stand, whatever their directories hold."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.runs.directory.test_damaged_directories import RUNS
from tests.said import typed


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two runs of which one is interrupted and older, and a folder of a model."""
    shutil.copytree(RUNS[0], tmp_path / "sweep" / "seed0", copy_function=shutil.copyfile)
    older = tmp_path / "older"
    shutil.copytree(RUNS[0], older)
    lines = (older / "history.jsonl").read_bytes().splitlines(keepends=True)
    (older / "history.jsonl").write_bytes(b"".join(lines[:-1]))
    for file in older.iterdir():
        os.utime(file, (time.time() - 7300,) * 2)
    shutil.copytree(RUNS[0], older / "rewound" / "1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8}')
    return tmp_path


def listed(directory: Path) -> list[str]:
    return typed("runs", str(directory)).stdout.splitlines()


def test_every_run_is_a_line_and_the_latest_comes_first(directory: Path) -> None:
    head, first, second = listed(directory)
    assert head.split() == ["run", "state", "kind", "generation", "best", "held-out", "updated"]
    done, asked = first.split()[3].split("/")
    assert done == asked
    assert first.split()[:3] == [str(directory / "sweep" / "seed0"), "complete", "ES"]
    updated = (time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() - s)) for s in (60, 0))
    assert first.partition(" correct  ")[2] in updated
    assert second.split()[:3] == [str(directory / "older"), "interrupted", "ES"]
    assert second.split()[3] == f"{int(done) - 1}/{asked}"


def test_runs_in_damaged_or_hostile_directories_are_listed_and_pointed_out(directory: Path) -> None:
    evil = directory / "\x1b[2J\n\u202eevil"
    (directory / "older").rename(evil)
    (evil / "config.json").write_bytes(b"\xff" * 100)
    os.utime(evil / "config.json", (time.time() - 7300,) * 2)
    _, _, line, note = listed(directory)
    assert rf"{directory}/\x1b[2J\n\u202eevil" in line
    assert "/?" in line
    assert note.startswith("1 run could not be read in full; what is wrong: ")
    assert "show log_path=" in note


@pytest.mark.parametrize("columns", [80, 60, 44])
def test_lines_fit_a_terminal(
    directory: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = typed("runs", str(directory)).stdout
    assert "\x1b[32mcomplete" in out
    monkeypatch.setenv("NO_COLOR", "1")
    lines = listed(directory)
    assert max(len(strip_styles(line)) for line in lines) <= columns
    assert any("sweep/seed0" in line for line in lines), "of a long path its end is shown"


def strip_styles(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)
