"""Sweep over full Configs: which sigma and learning rate suit Countdown?

    python recipes/sweep_countdown.py
    python recipes/sweep_countdown.py sigmas=0.003,0.01 seeds=0,1 workers=2 base.num_generations=30

Copy this script to vary any part of a Config: `config` builds one from a trial's options. Run it
again to continue an interrupted sweep; recorded runs are not repeated. The results are printed and
written to `<log_path>/results.md` and `.parquet`. To sweep plain options of a recipe, use
`es-cookbook sweep` instead (docs/sweeps.md).
"""

import functools
from collections.abc import Mapping

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.plugins.sweep.loop import SweepSettings, sweep
from es_cookbook.plugins.sweep.search import Value, Values
from es_cookbook.recipes.countdown.train_cli import CLIConfig


@chz.chz
class CountdownSweep(SweepSettings):
    """Train with every combination of sigma, learning rate and seed."""

    log_path: str = chz.field(default="runs/sweep-countdown", doc="directory of all runs")
    sigmas: tuple[float, ...] = chz.field(default=(0.003, 0.005, 0.01), doc="optimizer.sigma")
    learning_rates: tuple[float, ...] = chz.field(
        default=(0.003, 0.01), doc="optimizer.learning_rate"
    )
    base: CLIConfig = chz.field(
        default_factory=CLIConfig, blueprint_unspecified=CLIConfig, doc="everything else"
    )


def config(base: CLIConfig, options: Mapping[str, Value]) -> CLIConfig:
    """Return a trial's Config; the sweep sets its seed and log_path."""
    return chz.replace(base, optimizer=chz.replace(base.optimizer, **options))


def main(settings: CountdownSweep) -> None:
    """Run what is not complete yet; print and write the table, best first."""
    space = {"sigma": Values(settings.sigmas), "learning_rate": Values(settings.learning_rates)}
    sweep(settings, functools.partial(config, settings.base), space)


if __name__ == "__main__":
    run_cli(main, CountdownSweep)
