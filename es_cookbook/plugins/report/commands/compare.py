"""Compare optimizers on a recipe: the same rollouts, several seeds, a table and a plot.

    python -m es_cookbook compare optimizers=es,momentum
    ... optimizers=es,genetic seeds=0,1 num_generations=30 genetic.optimizer.sigma=0.02
    ... optimizers=es,genetic genetic.optimizer.population_size=32 genetic.num_generations=100

Each optimizer starts as `optimizer=<name>` does in the recipe. An option of the recipe applies to
every run; prefixed with an optimizer's name, only to that optimizer's runs. All must make the same
number of rollouts. To compare settings of one optimizer, use `sweep`.

Runs are ordinary ones, in `<log_path>/<optimizer>-seed<seed>`. The same command continues where it
was interrupted and skips complete runs, so an optimizer is added by naming it. The results are
printed, and written to `comparison.md`, `.png` and `.svg` there.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import chz

from es_cookbook.cli.options import recipe_config
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.options import built
from es_cookbook.common.terminal import say
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.plugins.report.plots import draw_runs, require_matplotlib
from es_cookbook.plugins.sweep.in_turn import refuse_unequal_rollouts, run_all
from es_cookbook.plugins.sweep.many_runs import by_label, check_comparison, check_not_set
from es_cookbook.runs.config import Config
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.curves import table
from es_cookbook.runs.tracking.jsonl import CORRECT
from es_cookbook.runs.tracking.reading import RunFiles, read_run
from es_cookbook.runs.tracking.trackers import TrackersBuilder

_REFUSED = {
    "optimizer": "optimizers=... says which; its fields are optimizer.NAME or, for one of them, "
    "OPTIMIZER.optimizer.NAME"
}


@chz.chz
class Compare:
    """Compare optimizers on a recipe, at equal rollouts."""

    optimizers: tuple[str, ...] = chz.field(doc="names, separated by commas")
    seeds: tuple[int, ...] = chz.field(default=(0, 1, 2), doc="seeds of each optimizer's runs")
    recipe: str = chz.field(default="countdown", doc="recipe to train on")
    metric: str = chz.field(default=CORRECT, doc="held-out metric to compare")
    log_path: str = chz.field(default="", doc="directory of all runs; empty: runs/compare-<recipe>")

    @chz.validate
    def _lists(self) -> None:
        for name in self.optimizers:
            if name not in OPTIMIZER_NAMES:
                raise ConfigError(f"unknown optimizer {name!r}: {nearest(name, OPTIMIZER_NAMES)}")
        check_comparison(self.metric, {"optimizers": self.optimizers, "seeds": self.seeds})

    @property
    def directory(self) -> Path:
        return Path(self.log_path or f"runs/compare-{self.recipe}")


def runs(compare: Compare, fields: Mapping[str, str]) -> dict[str, list[Config]]:
    """Return the Configs of each optimizer's runs, one per seed; only inside `run_cli`.

    `fields` are options of all runs, as a user types them, or of one optimizer's: `NAME.field`.

    Raises:
        ConfigError: An option does not exist or is set by the comparison; unequal rollouts.
    """
    of_all, of_one = by_label(fields, compare.optimizers, OPTIMIZER_NAMES, "an optimizer")
    for options in (of_all, *of_one.values()):
        check_not_set(options, "comparison", _REFUSED)

    make = cast("Callable[..., Config]", recipe_config(compare.recipe))
    default = make(trackers=TrackersBuilder(live=None))
    found: dict[str, list[Config]] = {}
    for name in compare.optimizers:
        config = built(default, {"optimizer": name, **of_all, **of_one[name]})
        found[name] = [
            chz.replace(config, seed=seed, log_path=str(compare.directory / f"{name}-seed{seed}"))
            for seed in compare.seeds
        ]
    refuse_unequal_rollouts(found)
    return found


def main(compare: Compare, fields: Mapping[str, str]) -> None:
    """Run the incomplete runs; print and write the table, and draw the curves."""
    compared = runs(compare, fields)
    require_matplotlib()
    run_all([config for configs in compared.values() for config in configs])
    found: dict[str, list[RunFiles]] = {}
    for name, configs in compared.items():
        found[name] = [read_run(Path(config.log_path)) for config in configs]
        for run in found[name]:
            for problem in run.problems:
                say(problem)
    text = table(found, compare.metric)
    written = compare.directory / "comparison"
    replace_file(written.with_suffix(".md"), [text.encode(), b"\n"])
    task = compare.recipe.replace("_", " ").capitalize()
    draw_runs(written, found, compare.metric, "rollouts", task=task)
    print(f"\n{text}\n\nwritten to {written}.md, and drawn in {written}.png and .svg")


def cli() -> None:
    more_help = (
        "\n\nAn option of the recipe (num_generations=30, dataset.num_test=100) applies to every "
        "run; prefixed\nwith an optimizer's name, only to its runs (es.optimizer.sigma=0.02).\n"
        f"optimizers: {', '.join(OPTIMIZER_NAMES)}"
    )
    run_with_fields(main, Compare, more_help)
