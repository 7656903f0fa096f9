"""The main job, as a newcomer runs it, for run seeds 0, 1 and 2.

    python -m benchmarks.main_job                         # run, measure and draw
    python -m benchmarks.main_job runs/a runs/b runs/c    # only draw runs that are there already

Each run is a separate process, `python -m es_cookbook.recipes.countdown.train_cli seed=<seed>`,
and everything is read from what it leaves: the metrics file and the kernel's record of the process.
Of the gain in held-out exact answers, Δcorrect = Δ(w · a) with w the share of well-formed answers
and a the share of those that are right, plus right answers that are not well-formed. The part
"form" is Δw · a before; "answers" is w after · Δa; "rest" is what is left, right answers in bad
form. The curves are drawn in `docs/plots/main_job.png` and `.svg`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, report, row
from es_cookbook.plugins.report.plots import Line, draw, require_matplotlib
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.tracking.jsonl import read_metrics

SEEDS = (0, 1, 2)
CORRECT = "test/env/all/correct"
PLOT = Path(__file__).parents[1] / "docs/plots/main_job"


def run_main_job(seed: int, log_path: Path) -> tuple[float, float]:
    """Return wall-clock seconds and peak resident GB of one run."""
    command = [sys.executable, "-m", "es_cookbook.recipes.countdown.train_cli"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"seed={seed}", f"log_path={log_path}"], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status != 0:
        raise SystemExit(f"the main job failed with status {status}: {' '.join(command)}")
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss / 1024
    return seconds, kilobytes / 1e6


def gain(metrics_path: Path) -> dict[str, float]:
    """Return held-out points gained over the warm start, and how they divide."""
    tests = [line for line in read_metrics(metrics_path) if CORRECT in line]

    def percent(name: str, line: dict[str, float]) -> float:
        return 100 * line[f"test/env/all/{name}"]

    before, after = tests[0], tests[-1]
    formed = [percent("well_formed", line) for line in (before, after)]
    right = [percent("correct_well_formed", line) for line in (before, after)]
    accuracy = [r / f if f else 0.0 for r, f in zip(right, formed, strict=True)]
    correct = percent("correct", after) - percent("correct", before)
    form = (formed[1] - formed[0]) * accuracy[0]
    answers = formed[1] * (accuracy[1] - accuracy[0])
    return {
        "before": percent("correct", before),
        "after": percent("correct", after),
        "gain": correct,
        "form": form,
        "answers": answers,
        "rest": correct - form - answers,
    }


def draw_runs(log_paths: Sequence[Path], plot: Path = PLOT) -> None:
    """Draw each run's held-out exact answers over its generations."""
    lines: dict[str, Line] = {}
    for seed, log_path in enumerate(log_paths):
        tests = [line for line in read_metrics(log_path / METRICS) if CORRECT in line]
        generations = np.array([line["progress/generation"] for line in tests])
        lines[f"seed {seed}"] = Line(generations, [[100 * line[CORRECT] for line in tests]])
    draw(
        plot,
        lines,
        title="Countdown, bundled model of 0.9 million parameters",
        x_label="generations of 64 genomes x 32 problems",
        y_label="held-out exact answers (%)",
    )


def main(drawn: Sequence[str]) -> None:
    """Run the seeds one after the other, report, and draw; or only draw these runs."""
    require_matplotlib()
    if drawn:
        draw_runs([Path(log_path) for log_path in drawn])
        return
    with tempfile.TemporaryDirectory() as directory:
        log_paths = [Path(directory) / f"seed{seed}" for seed in SEEDS]
        rows = [
            measured
            for seed, log_path in zip(SEEDS, log_paths, strict=True)
            for measured in rows_of(seed, log_path)
        ]
        draw_runs(log_paths)
    report("main_job", rows)


def rows_of(seed: int, log_path: Path) -> list[Row]:
    """Run one seed; its lines of the table."""
    seconds, gigabytes = run_main_job(seed, log_path)
    gained = gain(log_path / METRICS)
    name = f"seed {seed}:"
    minutes = [seconds / 60]
    right, rest = [gained["answers"]], [gained["rest"]]
    return [
        row(f"{name} minutes, start and evaluations included", minutes, "min", at_most=1.5),
        row(f"{name} held-out exact answers before", [gained["before"]], "%"),
        row(f"{name} held-out exact answers after", [gained["after"]], "%"),
        row(f"{name} gain", [gained["gain"]], "points", at_least=20),
        row(f"{name} of it form", [gained["form"]], "points"),
        row(f"{name} of it well-formed answers becoming right", right, "points"),
        row(f"{name} of it right answers in bad form", rest, "points"),
        row(f"{name} peak resident memory", [gigabytes], "GB", at_most=2),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
