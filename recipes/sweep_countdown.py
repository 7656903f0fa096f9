"""A grid over full Configs: which sigma and learning rate suit Countdown?

    python recipes/sweep_countdown.py
    python recipes/sweep_countdown.py sigmas=0.003,0.01 seeds=0 base.num_generations=30

Runs go one after the other, since each uses the whole machine. Run it again to go on where it
stopped: what is recorded is not done twice. The results are printed, and written to
`<log_path>/results.csv`.
"""

import csv
import io
import itertools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics

COLUMNS = ("sigma", "learning_rate", "seed", "correct before", "correct after", "minutes")


@chz.chz
class Sweep:
    """Train with every combination of sigma, learning rate and seed."""

    sigmas: tuple[float, ...] = chz.field(default=(0.003, 0.005, 0.01), doc="optimizer.sigma")
    learning_rates: tuple[float, ...] = chz.field(
        default=(0.003, 0.01), doc="optimizer.learning_rate"
    )
    seeds: tuple[int, ...] = chz.field(default=(0,), doc="seed")
    base: CLIConfig = chz.field(
        default_factory=CLIConfig, blueprint_unspecified=CLIConfig, doc="everything else"
    )
    log_path: str = chz.field(default="runs/sweep-countdown", doc="directory of all runs")


def configs(sweep: Sweep) -> list[CLIConfig]:
    """The grid."""
    assert isinstance(sweep.base.optimizer, ES)
    return [
        chz.replace(
            sweep.base,
            optimizer=chz.replace(sweep.base.optimizer, sigma=sigma, learning_rate=learning_rate),
            seed=seed,
            log_path=str(Path(sweep.log_path) / f"sigma{sigma:g}-lr{learning_rate:g}-seed{seed}"),
            trackers=JsonlTrackerBuilder(),
            behavior_if_log_dir_exists="resume",
        )
        for sigma, learning_rate, seed in itertools.product(
            sweep.sigmas, sweep.learning_rates, sweep.seeds
        )
    ]


def result(config: CLIConfig) -> list[float]:
    """A run's line in the table."""
    assert isinstance(config.optimizer, ES)
    rows = read_metrics(Path(config.log_path) / "metrics.jsonl")
    correct = [row["test/env/all/correct"] for row in rows if "test/env/all/correct" in row]
    minutes = sum(row.get("time/total", 0.0) for row in rows) / 60
    settings = [config.optimizer.sigma, config.optimizer.learning_rate, config.seed]
    return [*settings, correct[0], correct[-1], round(minutes, 2)]


def main(sweep: Sweep) -> None:
    """Run the grid; print and write the table after every run, best first."""
    results: list[list[float]] = []
    for number, config in enumerate(grid := configs(sweep), start=1):
        print(f"run {number} of {len(grid)}: {config.log_path}", flush=True)
        try:
            train.run(config)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run the same command again to go on") from None
        results.append(result(config))
        results.sort(key=lambda row: -row[COLUMNS.index("correct after")])
        table = io.StringIO()
        csv.writer(table).writerows([COLUMNS, *results])
        replace_file(Path(sweep.log_path) / "results.csv", [table.getvalue().encode()])
    for row in [COLUMNS, *results]:
        print("  ".join(f"{cell:>14}" for cell in row))


if __name__ == "__main__":
    run_cli(main, Sweep)
