"""Temporary folders are removed by their process, or by the next one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from es_cookbook.plugins.gradients.scratch import scratch
with scratch() as folder:
    (folder / "rows.jsonl").write_text("a row")
    print(folder, flush=True)
    sys.stdin.readline()
"""


def started(tmp_path: Path) -> tuple["subprocess.Popen[str]", Path]:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_killed_processes_are_removed_and_those_in_use_stay(
    tmp_path: Path,
) -> None:
    others = tmp_path / "es_cookbook-notes"
    others.mkdir()
    (tmp_path / "es_cookbook-link").symlink_to(others)
    (others / "mine").write_text("mine")
    killed, left = started(tmp_path)
    living, used = started(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (left / "rows.jsonl").exists()
    last, _ = started(tmp_path)
    last.communicate("\n")
    assert not left.parent.exists() and (used / "rows.jsonl").exists()
    living.communicate("\n")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"es_cookbook-notes", "es_cookbook-link"}
