"""What SmolLM2-135M-Instruct learns of each task of the recipe `chat`, and how long that takes.

    python -m benchmarks.chat                     # all tasks, three seeds
    python -m benchmarks.chat sums extraction     # some

The model is that of `make chat-model`. Each run is a process of its own with the recipe's settings,
on all cores. `form` is the metric that says whether an answer has the form that was asked for.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import Row, before_and_after, call, report, row
from benchmarks.sigma import CHAT_MODEL

SEEDS = (0, 1, 2)
TASKS: Mapping[str, tuple[float, float]] = {
    "sums": (50, 10),
    "constraints": (20, 15),
    "conciseness": (20, 15),
    "extraction": (20, 15),
}
"""Task -> points to gain, in so many minutes."""


def rows_of(task: str, seed: int) -> list[Row]:
    """Run one seed; its lines of the table."""
    points, most = TASKS[task]
    with tempfile.TemporaryDirectory() as directory:
        log_path = Path(directory) / "run"
        options = {"model_name": CHAT_MODEL, "dataset.task": task, "seed": seed}
        words = (f"{name}={value}" for name, value in options.items())
        clock, _ = call("chat", *words, f"log_path={log_path}")
        found = {
            name: [100 * value for value in before_and_after(log_path, f"test/env/all/{name}")]
            for name in ("correct", "well_formed")
        }
    (before, after), form, minutes = found["correct"], found["well_formed"], clock / 60
    print(f"{task}, seed {seed}: {before:.1f} -> {after:.1f} in {minutes:.1f} min", flush=True)
    name = f"{task}, seed {seed}:"
    return [
        row(f"{name} correct before", [before], "%"),
        row(f"{name} correct after", [after], "%"),
        row(f"{name} gain", [after - before], "points", at_least=points),
        row(f"{name} well-formed before", [form[0]], "%"),
        row(f"{name} well-formed after", [form[1]], "%"),
        row(f"{name} minutes, start included", [minutes], "min", at_most=most),
    ]


def main(chosen: list[str]) -> None:
    """Run tasks and seeds one after the other, and report on each task."""
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    for task in chosen or TASKS:
        report("chat", [each for seed in SEEDS for each in rows_of(task, seed)], task)


if __name__ == "__main__":
    main(sys.argv[1:])
