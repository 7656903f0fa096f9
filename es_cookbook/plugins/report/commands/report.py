"""Write a page about runs: their metrics, genomes, recorded rollouts and Configs.

    es-cookbook report runs/mine
    es-cookbook report runs/es-0 runs/es-1 runs/grpo output=both.html
    es-cookbook report runs/mine watch=true

The page is one HTML file that needs no network and opens from the disk. Runs that differ only in
their seed are drawn as their mean and range, and runs of gradients beside those of evolution
strategies. The runs may be in progress. With `watch=true` no file is written: the page is served on
127.0.0.1, and follows the runs; this needs `pip install 'es-cookbook[serve]'`.
"""

from pathlib import Path

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError, importing
from es_cookbook.common.terminal import printable, say
from es_cookbook.plugins.report.writing import MEGABYTES, write_report
from es_cookbook.runs.directory.directory import REPORT


@chz.chz
class Report:
    """Write a page about one run or several."""

    log_path: tuple[str, ...] = chz.field(doc="run directories", metadata=UNNAMED)
    output: str = chz.field(
        default="", doc="file; empty: report.html in the run's directory, or here for several runs"
    )
    megabytes: float = chz.field(default=MEGABYTES, doc="maximum size; longer texts are cut")
    watch: bool = chz.field(default=False, doc="serve the page on 127.0.0.1 and follow the runs")

    @chz.validate
    def _consistent(self) -> None:
        check_range(self, "megabytes", at_least=1, at_most=500)
        if not any(self.log_path):
            raise ConfigError("log_path must name a run directory, found none")


def main(report: Report) -> None:
    paths = list(dict.fromkeys(Path(path) for path in report.log_path if path))
    written = Path(report.output or (paths[0] / REPORT if len(paths) == 1 else REPORT))
    say(f"reading {', '.join(map(str, paths[:3]))}")
    if report.watch:
        with importing("watch", "es-cookbook[serve]", "starlette", "uvicorn"):
            from es_cookbook.plugins.report.serving import watch
        return anyio.run(watch, paths, report.megabytes)
    print(printable(write_report(paths, written, megabytes=report.megabytes)), flush=True)


def cli() -> None:
    run_cli(main, Report)
