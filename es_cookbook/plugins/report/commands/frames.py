"""Write runs as one table in a Parquet or CSV file, for pandas, Polars, DuckDB or R.

    python -m es_cookbook frames runs/a,runs/b output=frames.parquet
    ... runs/sweep output=rollouts.parquet of=rollouts

A row is a generation of a run, or a rollout that it recorded; `es_cookbook.plugins.report.frames`
says which columns there are. A directory of run directories, such as a sweep's, stands for all of
them.
"""

from pathlib import Path

import chz

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.terminal import plural
from es_cookbook.plugins.report.frames import Of, frames, write_table


@chz.chz
class Frames:
    """Write runs as one table, with a row per generation or per recorded rollout."""

    log_path: tuple[str, ...] = chz.field(
        doc="run directories, or directories of run directories, separated by commas",
        metadata=UNNAMED,
    )
    output: str = chz.field(
        default="frames.parquet",
        doc=".parquet or .csv file to write; an existing one is replaced",
    )
    of: Of = chz.field(default="generations", doc="what a row stands for")


def main(config: Frames) -> None:
    """Write the file, and say what is in it."""
    table = frames(config.log_path, config.of)
    write_table(table, Path(config.output))
    what = f"{plural(len(table), 'row')} of {plural(len(set(table['run'])), 'run')}"
    print(f"{what}, with {plural(len(table.columns), 'column')}: {config.output}")


def cli() -> None:
    run_cli(main, Frames)
