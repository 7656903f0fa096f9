"""Does paying for pass@4 raise held-out pass@4 by more than paying for pass@1 does?

    python -m benchmarks.pass_at_k

The bundled model is trained on Countdown at temperature 1, eight attempts of each genome at each
problem, once for the chance that one attempt is right and once for the chance that one of four is.
Both are estimated from the same eight attempts and count the metric `correct`, so that nothing
differs but k: problems, seeds, population and rollouts are the same, and the settings are the main
job's where nothing else is said here. Held-out problems are attempted four times at temperature 1,
before and after.

An attempt at temperature 1 is right less often than a greedy one, so pass@1 here is below the main
job's. Eight attempts and not four, because with as many attempts as k a genome's pass@k at a
problem is 0 or 1, the noisiest estimate there is.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Row, report, row
from es_cookbook.runs.run_directory import METRICS
from es_cookbook.runs.tracking.jsonl import read_metrics

SEEDS = (0, 1, 2)
OBJECTIVES: Mapping[str, Sequence[str]] = {
    "pass@1": ("objective=pass_at_k", "objective.k=1"),
    "pass@4": ("objective=pass_at_k", "objective.k=4"),
}
SETTINGS = (
    "sampling.temperature=1",
    "eval_attempts=4",
    "eval_temperature=1",
    "eval_every=0",
    # As many rollouts a generation as the main job's 64 genomes, 32 problems and one attempt.
    "optimizer.population_size=32",
    "dataset.problems_per_generation=8",
    "attempts=8",
    "trackers=JsonlTrackerBuilder",
)


def train(options: Sequence[str], log_path: Path) -> list[dict[str, float]]:
    """Held-out measurements of one run, the first before it and the last after it."""
    command = [sys.executable, "-m", "es_cookbook.recipes.countdown.train_cli", *options]
    subprocess.run([*command, f"log_path={log_path}"], stdout=subprocess.DEVNULL, check=True)
    return [line for line in read_metrics(log_path / METRICS) if "test/pass@1" in line]


def main(more: Sequence[str] = ()) -> None:
    """Both objectives with every seed, by turns.

    Args:
        more: options for every run, to try it smaller: `num_generations=3 dataset.num_test=20`.
    """
    gains: dict[tuple[str, str], list[float]] = {}
    befores: dict[str, list[float]] = {}
    for seed in SEEDS:
        for objective, options in OBJECTIVES.items():
            with tempfile.TemporaryDirectory() as directory:
                given = [*SETTINGS, *options, f"seed={seed}", *more]
                before, *_, after = train(given, Path(directory) / "run")
            for measured in ("pass@1", "pass@4"):
                points = [100 * line[f"test/{measured}"] for line in (before, after)]
                gains.setdefault((objective, measured), []).append(points[1] - points[0])
                befores.setdefault(measured, []).append(points[0])
            found = ", ".join(
                f"{measured} {gains[objective, measured][-1]:+.1f}" for measured in befores
            )
            print(f"seed {seed}, objective {objective}: {found} points", flush=True)
    rows: list[Row] = [
        row(f"held-out {measured} before", values, "%") for measured, values in befores.items()
    ]
    for measured in befores:
        rows += [
            row(
                f"gain in held-out {measured} by the {objective} objective",
                gains[objective, measured],
                "points",
            )
            for objective in OBJECTIVES
        ]
    differences = [
        four - one
        for four, one in zip(gains["pass@4", "pass@4"], gains["pass@1", "pass@4"], strict=True)
    ]
    rows += [
        row("pass@4: gain by its own objective less that by pass@1", differences, "points"),
        row("the same, mean of the seeds", [statistics.mean(differences)], "points", at_least=0),
    ]
    report("pass_at_k", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
