"""Gains and costs of the recipe markovian, by evolution strategies and by gradients.

    python -m benchmarks.markovian            # both, three seeds each
    python -m benchmarks.markovian gradient   # one of them

A seed is two runs, each a separate process: the recipe, and the same with the question in sight
(`dataset.markovian=False`). Both are studied (`es_cookbook.plugins.markovian.study`) on the same
held-out sums. Reported are right answers of the Markovian run before and after, greedy; and the
log-probability of the answer that is lost where thoughts are damaged, Markovian less not, with its
95 % interval.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, before_and_after, call, report, row

SEEDS = (0, 1, 2)
WAYS = {
    "es": ("markovian",),
    "gradient": ("policy_gradient", "recipe=markovian", "attempts=32", "num_generations=20"),
}
"""Name -> command and options; the gradient makes a thirteenth of the rollouts."""
MEASURED = ("dataset.num_test=200", "eval_every=0")
CORRECT = "test/env/all/correct"


def rows_of(way: str, seed: int, directory: Path) -> list[Row]:
    """Run one seed; its lines of the table."""
    name = f"{way}, seed {seed}:"
    minutes: list[Row] = []
    for run, markovian in (("markovian", True), ("open", False)):
        options = [f"seed={seed}", f"log_path={directory / run}", *MEASURED]
        _, processor = call(*WAYS[way], *options, f"dataset.markovian={markovian}")
        minutes.append(row(f"{name} processor minutes, {run}", [processor / 60], "min"))
    return [*studied(name, directory), *minutes]


def studied(name: str, directory: Path) -> list[Row]:
    """Return results of the two runs in a directory."""
    study = [sys.executable, "-m", "es_cookbook.plugins.markovian.study", "plots=False"]
    options = [f"log_path={directory / 'markovian'}", f"against={directory / 'open'}"]
    subprocess.run([*study, *options], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((directory / "markovian-study" / "study.json").read_text("utf-8"))
    before, after = before_and_after(directory / "markovian", CORRECT)
    open_before, open_after = before_and_after(directory / "open", CORRECT)
    gap = found["comparisons"]["fragility"]
    return [
        row(f"{name} right before", [100 * before], "%"),
        row(f"{name} right after", [100 * after], "%", at_least=60),
        row(f"{name} right before, question in sight", [100 * open_before], "%"),
        row(f"{name} right after, question in sight", [100 * open_after], "%"),
        row(f"{name} fragility", [gap["first"]], "nats"),
        row(f"{name} fragility, question in sight", [gap["second"]], "nats"),
        row(f"{name} fragility gap", [gap["difference"]], "nats"),
        row(f"{name} fragility gap, lower end", [gap["low"]], "nats", at_least=0),
        row(f"{name} fragility gap, upper end", [gap["high"]], "nats"),
    ]


def main(chosen: Sequence[str]) -> None:
    """Run seed after seed, and report on each way."""
    for way in chosen or WAYS:
        rows: list[Row] = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as directory:
                rows += rows_of(way, seed, Path(directory))
        report("markovian", rows, way)


if __name__ == "__main__":
    main(sys.argv[1:])
