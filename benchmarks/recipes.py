"""What every recipe's small setting gains on held-out problems, and how long it takes.

    python -m benchmarks.recipes               # all
    python -m benchmarks.recipes code logic    # some

Each run is a process of its own, `python -m es_cookbook <recipe> seed=<seed>` without other
options. Before and after are the first and the last evaluation of the centre; `form` is the metric
that says whether an answer has the right form, so what a gain in form could explain is seen.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Row, report, row
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.tracking.jsonl import read_metrics

SEEDS = (0, 1, 2)
RECIPES = {
    "arithmetic": ("correct", "well_formed"),
    "math": ("correct", "format"),
    "logic": ("correct", "well_formed"),
    "rush_hour": ("correct", "well_formed"),
    "code": ("solved", "answered"),
    "crossword": ("correct", "format"),
    "conciseness": ("concise", "correct"),
    "mixture": ("correct", "well_formed"),
    "guess_number": ("correct", "well_formed"),
    "calculator": ("correct", "well_formed"),
    "search": ("correct", "well_formed"),
}
"""Recipe -> metric that is to rise, and metric of the form; Countdown has `main_job`."""


def measured(recipe: str, seed: int, log_path: Path) -> tuple[list[float], list[float], float]:
    """The metric and the form in percent, before and after, and minutes."""
    command = [sys.executable, "-m", "es_cookbook", recipe, f"seed={seed}", f"log_path={log_path}"]
    began = time.perf_counter()
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | threads)
    minutes = (time.perf_counter() - began) / 60
    metric, form = (f"test/env/all/{name}" for name in RECIPES[recipe])
    tests = [line for line in read_metrics(log_path / METRICS) if metric in line]
    ends = tests[0], tests[-1]
    return [100 * line[metric] for line in ends], [100 * line[form] for line in ends], minutes


def rows_of(recipe: str, seed: int) -> list[Row]:
    """Run one seed; its lines of the table."""
    metric, form = RECIPES[recipe]
    with tempfile.TemporaryDirectory() as directory:
        values, forms, minutes = measured(recipe, seed, Path(directory) / "run")
    name = f"{recipe}, seed {seed}:"
    print(f"{name} {values[0]:.1f} -> {values[1]:.1f} in {minutes:.1f} min", flush=True)
    return [
        row(f"{name} {metric} before", [values[0]], "%"),
        row(f"{name} {metric} after", [values[1]], "%"),
        row(f"{name} gain", [values[1] - values[0]], "points", at_least=10),
        row(f"{name} {form} before", [forms[0]], "%"),
        row(f"{name} {form} after", [forms[1]], "%"),
        row(f"{name} minutes", [minutes], "min", at_most=5),
    ]


def main(chosen: list[str]) -> None:
    """Run the seeds one after the other, and report."""
    runs = [(recipe, seed) for recipe in chosen or RECIPES for seed in SEEDS]
    report("recipes", [each for recipe, seed in runs for each in rows_of(recipe, seed)])


if __name__ == "__main__":
    main(sys.argv[1:])
