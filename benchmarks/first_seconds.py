"""Seconds that a user waits for a command's help, a refusal, and the first line of a run.

    python -m benchmarks.first_seconds

Each command is a separate process, with the files of Python's packages in the page cache after a
round that is not counted. The commands take turns. Times are seconds on the wall, so they need two
otherwise idle cores.
"""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import interleaved, report, row
from es_cookbook.cli import COMMANDS, RECIPES
from es_cookbook.runs.directory.directory import locked

REPEATS = 9
AT_MOST, FIRST_LINE_AT_MOST = 2, 1
"""Seconds."""


def call(*arguments: str, code: int, says: str) -> None:
    """Run a command, and check its status and what it says."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr


def first_line(log_path: Path) -> None:
    """Start a run, and end it as soon as it has printed something."""
    command = [sys.executable, "-m", "es_cookbook", "countdown", f"log_path={log_path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as run:
        assert run.stderr is not None
        line = run.stderr.readline().decode()
        run.kill()
    assert line.startswith(f"{log_path}: loading "), line


def main() -> None:
    """Measure and report."""
    helps = {
        f"`es-cookbook {name} --help`".replace("  ", " "): functools.partial(
            call, "es_cookbook", *name.split(), "--help", code=0, says="usage: "
        )
        for name in ("", *COMMANDS, *RECIPES)
    }
    recipe = "es_cookbook.recipes.countdown.train_cli"
    helps[f"`python -m {recipe} --help`"] = functools.partial(
        call, recipe, "--help", code=0, says="usage: "
    )
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        taken = Path(directory) / "taken"
        stack.enter_context(locked(taken))
        countdown = functools.partial(call, "es_cookbook", "countdown")
        refusals = {
            "an unknown option is refused": functools.partial(
                countdown, "optimizer.sgima=0.1", code=2, says="unknown option"
            ),
            "a wrong value is refused": functools.partial(
                countdown, "engine.max_batch_size=0", code=1, says="max_batch_size must be"
            ),
            "a directory in which another process trains is refused": functools.partial(
                countdown, f"log_path={taken}", code=1, says=f"process {os.getpid()}"
            ),
        }
        seconds = interleaved({**helps, **refusals}, REPEATS)
        starts: list[float] = []
        for repeat in range(-1, REPEATS):
            started = time.perf_counter()
            first_line(Path(directory) / str(repeat))
            starts += [time.perf_counter() - started] if repeat >= 0 else []
    rows = [row(name, times, "s", at_most=AT_MOST) for name, times in seconds.items()]
    first = row("the first line of a run is shown", starts, "s", at_most=FIRST_LINE_AT_MOST)
    report("first_seconds", [*rows, first])


if __name__ == "__main__":
    main()
