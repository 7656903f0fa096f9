"""Costs and gains of each tournament: the recipe pairwise with one pattern at a time.

    python -m benchmarks.pairwise              # all, three seeds each
    python -m benchmarks.pairwise default all  # some

Every run is a separate process, `python -m es_cookbook pairwise seed=<seed>` with the variant's
options. Measured are right answers of the centre, held out, before and after, and judgements per
problem and generation. The rest is about the judge: how often the first place wins, and how often
swapping the order changes the winner.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row, before_and_after, call, report, row
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.tracking.jsonl import read_metrics

SEEDS = (0, 1, 2)
VARIANTS = {
    "default": "",
    "all": "dataset.tournament.opponents=1000",
    "ring_2": "dataset.tournament.opponents=2",
    "centre": "dataset.tournament.pattern=centre",
}
"""Name -> options; the default is a ring with four opponents."""
CORRECT = "test/env/all/correct"
OF_JUDGE = ("answers", "judgements", "first_wins", "swap_changes")


def measured(variant: str, seed: int, log_path: Path) -> dict[str, float]:
    """Return right answers in percent, before and after, and means over the generations."""
    options = [*VARIANTS[variant].split(), f"seed={seed}", f"log_path={log_path}", "eval_every=0"]
    call("pairwise", *options)
    before, after = before_and_after(log_path, CORRECT)
    found = {"before": 100 * before, "after": 100 * after}
    lines = list(read_metrics(log_path / METRICS))
    for name in OF_JUDGE:
        values = [line[f"env/all/{name}"] for line in lines if f"env/all/{name}" in line]
        if values:
            found[name] = statistics.mean(values)
    return found


def main(chosen: list[str]) -> None:
    """Run the variants, seed after seed, and report."""
    for variant in chosen or VARIANTS:
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as directory:
            found = [measured(variant, seed, Path(directory) / f"{seed}") for seed in SEEDS]
        for seed, each in zip(SEEDS, found, strict=True):
            said = ", ".join(f"{name} {value:.3g}" for name, value in each.items())
            print(f"{variant}, seed {seed}: {said}", flush=True)
        gains = [each["after"] - each["before"] for each in found]
        rows.append(row(f"{variant}: gain in right answers", gains, "points"))
        for name in OF_JUDGE:
            if name in found[0]:
                rows.append(row(f"{variant}: {name}", [each[name] for each in found], ""))
        report("pairwise", rows, variant)


if __name__ == "__main__":
    main(sys.argv[1:])
