"""Write a page about runs: what they measured, their genomes, what models wrote, and their Configs.

    es-cookbook report runs/mine
    es-cookbook report runs/es-0 runs/es-1 runs/grpo output=both.html
    es-cookbook report runs/mine watch=true

One HTML file that needs no network and opens from the disk. Runs that differ in their seed alone
are drawn as their mean and range; runs of gradients are drawn beside those of evolution strategies.
With `watch=true` the file is written again whenever the runs have changed; reload it in the
browser.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import printable, say
from es_cookbook.plugins.report.writing import MEGABYTES, write_report
from es_cookbook.runs.directory.directory import HISTORY, METRICS, REPORT, ROLLOUTS

_SECONDS = 5.0
"""Between two looks at runs that are watched."""


@chz.chz
class Report:
    """Write a page about one run or several, or serve it while they go on."""

    log_path: tuple[str, ...] = chz.field(
        doc="run directories, separated by commas or as separate arguments", metadata=UNNAMED
    )
    output: str = chz.field(
        default="",
        doc="file to write; empty: report.html in the run's directory, or here for several runs",
    )
    megabytes: float = chz.field(
        default=MEGABYTES, doc="maximum size of the file; longer texts are cut"
    )
    watch: bool = chz.field(
        default=False, doc="write the file again when the runs have changed, until Ctrl-C"
    )

    @chz.validate
    def _consistent(self) -> None:
        check_range(self, "megabytes", at_least=1, at_most=500)
        if not any(self.log_path):
            raise ConfigError("log_path must name a run directory, found none")

    @property
    def log_paths(self) -> list[Path]:
        """The run directories, each once."""
        return list(dict.fromkeys(Path(path) for path in self.log_path if path))

    @property
    def written(self) -> Path:
        paths = self.log_paths
        return Path(self.output or (paths[0] / REPORT if len(paths) == 1 else REPORT))


def main(report: Report) -> None:
    seen = _sizes(report.log_paths)
    say(f"reading {', '.join(map(str, report.log_paths[:3]))}")
    done = write_report(report.log_paths, report.written, megabytes=report.megabytes)
    print(printable(done), flush=True)
    while report.watch:
        time.sleep(_SECONDS)
        if (sizes := _sizes(report.log_paths)) != seen:
            seen = sizes
            write_report(report.log_paths, report.written, megabytes=report.megabytes)


def _sizes(log_paths: Sequence[Path]) -> Sequence[int]:
    """Bytes of the files that runs append to."""
    files = [path / name for path in log_paths for name in (HISTORY, METRICS, ROLLOUTS)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def cli() -> None:
    run_cli(main, Report)
