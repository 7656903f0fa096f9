"""Draw a metric of runs over rollouts, generations, tokens or seconds, as a PNG and an SVG.

    python -m es_cookbook plot runs/es-seed0 runs/es-seed1 runs/gradient
    ... runs/mine metric=reward/mean x=generations

Runs of evolution strategies and of gradients are drawn alike. Runs that differ only in their seed
are one curve: their mean, with their range as a band. The run directories are only read.
"""

from pathlib import Path

import chz

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import say
from es_cookbook.plugins.report.curve_names import grouped
from es_cookbook.plugins.report.plots import draw_runs, require_matplotlib
from es_cookbook.runs.files import cannot
from es_cookbook.runs.tracking.curves import Spent
from es_cookbook.runs.tracking.jsonl import CORRECT
from es_cookbook.runs.tracking.reading import read_run, task_of


@chz.chz
class Plot:
    """Draw curves of runs, as a PNG and an SVG for a paper."""

    log_path: tuple[str, ...] = chz.field(doc="run directories", metadata=UNNAMED)
    output: str = chz.field(default="plots/curves", doc="output path without .png and .svg")
    metric: str = chz.field(default=CORRECT, doc="key of metrics.jsonl")
    x: Spent = chz.field(default="rollouts", doc="x axis")
    title: str = chz.field(default="", doc="title; empty: the task and the number of seeds")

    @chz.validate
    def _paths(self) -> None:
        if not self.log_path:
            raise ConfigError("log_path must name at least one, found none")


def main(config: Plot) -> None:
    """Draw, and print the names of the files.

    Raises:
        ConfigError: A run has not measured the metric, or matplotlib is not installed.
        RunDirectoryError: A path is not a run directory, or the files cannot be written.
    """
    require_matplotlib()
    output = Path(config.output)
    if output.suffix in (".png", ".svg"):
        output = output.with_suffix("")
    runs = [read_run(path) for path in dict.fromkeys(map(Path, config.log_path))]
    for run in runs:
        for problem in run.problems:
            say(problem)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", output.parent, error, needed=4096) from error
    tasks = " and ".join(dict.fromkeys(task_of(run.config) for run in runs))
    written = draw_runs(
        output, grouped(runs), config.metric, config.x, task=tasks, title=config.title
    )
    print(f"written to {', '.join(map(str, written))}")


def cli() -> None:
    run_cli(main, Plot)
