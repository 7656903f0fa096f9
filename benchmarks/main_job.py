"""The main job, as a newcomer runs it, for run seeds 0, 1 and 2.

    python -m benchmarks.main_job

Each run is a process of its own, `python -m es_cookbook.recipes.countdown.train_cli seed=<seed>`,
and everything is read from what it leaves: the metrics file and the kernel's record of the process.
Of the gain in held-out exact answers, Δcorrect = Δ(w · a) with w the share of well-formed answers
and a the share of those that are right, plus right answers that are not well-formed. The part
"form" is Δw · a before; "answers" is w after · Δa; "rest" is what is left, right answers in bad
form.
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


def run_main_job(seed: int, log_path: Path) -> tuple[float, float]:
    """Wall-clock seconds and peak resident GB of one run."""
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
    """Held-out points gained over the warm start, and how they divide."""
    tests = [line for line in read_metrics(metrics_path) if "test/env/all/correct" in line]

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


def main() -> None:
    """Run the seeds one after the other and report."""
    rows: list[Row] = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            log_path = Path(directory) / "run"
            seconds, gigabytes = run_main_job(seed, log_path)
            gained = gain(log_path / METRICS)
        rows += [
            row(
                f"seed {seed}: minutes, start and evaluations included",
                [seconds / 60],
                "min",
                at_most=5,
            ),
            row(f"seed {seed}: held-out exact answers before", [gained["before"]], "%"),
            row(f"seed {seed}: held-out exact answers after", [gained["after"]], "%"),
            row(f"seed {seed}: gain", [gained["gain"]], "points", at_least=20),
            row(f"seed {seed}: of it form", [gained["form"]], "points"),
            row(
                f"seed {seed}: of it well-formed answers becoming right",
                [gained["answers"]],
                "points",
            ),
            row(f"seed {seed}: of it right answers in bad form", [gained["rest"]], "points"),
            row(f"seed {seed}: peak resident memory", [gigabytes], "GB", at_most=2),
        ]
    report("main_job", rows)


if __name__ == "__main__":
    main()
