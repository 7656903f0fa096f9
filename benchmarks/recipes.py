"""What every recipe's small setting gains on held-out problems, and how long it takes.

    python -m benchmarks.recipes               # all
    python -m benchmarks.recipes code logic    # some

Each run is a process of its own, `python -m es_cookbook <recipe> seed=<seed>` without other
options. Before and after are the first and the last evaluation of the centre; `form` is the metric
that says whether an answer has the right form, so what a gain in form could explain is seen.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row, before_and_after, call, report, row

SEEDS = (0, 1, 2)
RECIPES = {
    "arithmetic": ("correct", "well_formed"),
    "math": ("correct", "format"),
    "logic": ("correct", "well_formed"),
    "rush_hour": ("correct", "well_formed"),
    "code": ("solved", "answered"),
    "crossword": ("correct", "format"),
    "conciseness": ("concise", "correct"),
    "pairwise": ("correct", "well_formed"),
    "mixture": ("correct", "well_formed"),
    "guess_number": ("correct", "well_formed"),
    "calculator": ("correct", "well_formed"),
    "search": ("correct", "well_formed"),
    "markovian": ("correct", "logprob"),
    "tic_tac_toe": ("loses_to_random", "illegal"),
}
"""Recipe -> metric that is to rise, and metric of the form; Countdown has `main_job`."""
FALLS = {"loses_to_random"}
"""Metrics that are to fall."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The metric and the form in percent, before and after; minutes by the clock, of processors."""

    values: list[float]
    forms: list[float]
    minutes: float
    processor_minutes: float


def measured(recipe: str, seed: int, log_path: Path) -> Measured:
    """Run one seed."""
    clock, processor = call(recipe, f"seed={seed}", f"log_path={log_path}")
    values, forms = (
        [100 * value for value in before_and_after(log_path, f"test/env/all/{name}")]
        for name in RECIPES[recipe]
    )
    return Measured(values, forms, clock / 60, processor / 60)


def rows_of(recipe: str, seed: int) -> list[Row]:
    """Run one seed; its lines of the table."""
    metric, form = RECIPES[recipe]
    with tempfile.TemporaryDirectory() as directory:
        run = measured(recipe, seed, Path(directory) / "run")
    name, values, forms = f"{recipe}, seed {seed}:", run.values, run.forms
    gain = (values[0] - values[1]) if metric in FALLS else (values[1] - values[0])
    took = f"{run.minutes:.1f} min ({run.processor_minutes:.1f} of processors)"
    print(f"{name} {values[0]:.1f} -> {values[1]:.1f} in {took}", flush=True)
    return [
        row(f"{name} {metric} before", [values[0]], "%"),
        row(f"{name} {metric} after", [values[1]], "%"),
        row(f"{name} gain", [gain], "points", at_least=10),
        row(f"{name} {form} before", [forms[0]], "%"),
        row(f"{name} {form} after", [forms[1]], "%"),
        row(f"{name} minutes, start included", [run.minutes], "min", at_most=5),
        row(f"{name} minutes of processors", [run.processor_minutes], "min"),
    ]


def main(chosen: list[str]) -> None:
    """Run recipes and seeds one after the other, and report on each recipe."""
    for recipe in chosen or RECIPES:
        report("recipes", [each for seed in SEEDS for each in rows_of(recipe, seed)], recipe)


if __name__ == "__main__":
    main(sys.argv[1:])
