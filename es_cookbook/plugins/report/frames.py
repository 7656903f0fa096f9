"""Write runs as one table for pandas, Polars, DuckDB or R, with a row per generation.

    python -m es_cookbook frames runs/a runs/b output=frames.parquet
    ... runs/sweep output=sweep.csv

In Python the table is a `pandas.DataFrame`:

    from es_cookbook.plugins.report.frames import frames

    table = frames(["runs/a", "runs/b"])
    table.groupby("optimizer.sigma")["test/env/all/correct"].last()

Columns: `run` (its directory), `generation`, `seed`, each field in which the Configs differ, by its
dotted path (`optimizer.sigma`), the keys of `metrics.jsonl`, and `history/...`: fitness, terms,
decay, rule and fingerprint. An extra row after the last generation has the last evaluation.

Files are read by `es_cookbook.runs.tracking.reading`: truncated, foreign and newer ones are left
out with a warning.
"""

import io
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import chz

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.terminal import one_line, plural
from es_cookbook.plugins.report.curve_names import differing
from es_cookbook.runs.directory.directory import CONFIG, GENERATION_KEYS, METRICS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.tracking.reading import RunFiles, read_run

if TYPE_CHECKING:
    import pandas

Paths: TypeAlias = str | Path | Iterable[str | Path]
SUFFIXES = (".parquet", ".csv")
_CLASS = "config"
"""Column of the Config's own class, which has no path."""
_LARGEST = 2**63 - 1
"""Parquet has no type for larger integers."""
_Row: TypeAlias = dict[str, object]

logger = logging.getLogger(__name__)


def frames(log_paths: Paths) -> "pandas.DataFrame":
    """Return runs as one table, in their order; the module's docstring has its columns.

    Args:
        log_paths: run directories, or directories of run directories, such as a sweep's.

    Raises:
        RunDirectoryError: None of them can be read.
    """
    runs = _read(log_paths)
    fields = dict.fromkeys(["seed", *differing(runs)])
    rows = [
        {"run": str(run.path), **row, **{path or _CLASS: run.config.get(path) for path in fields}}
        for run in runs
        for row in _generations(run)
    ]
    return table_of(rows, first=("run", "generation", *(path or _CLASS for path in fields)))


def write_table(table: "pandas.DataFrame", output: Path) -> None:
    """Write a table as a Parquet or CSV file atomically; an existing file is replaced.

    Raises:
        ConfigError: The name has another suffix.
        RunDirectoryError: The file cannot be written.
    """
    if output.suffix not in SUFFIXES:
        raise ConfigError(
            f"output must be a file whose name ends in {' or '.join(SUFFIXES)}, found {output}"
        )
    if output.suffix == ".csv":
        replace_file(output, [table.to_csv(index=False).encode("utf-8", "replace")])
        return
    written = io.BytesIO()
    table.to_parquet(written, engine="pyarrow", index=False)
    replace_file(output, [written.getvalue()])


def _read(log_paths: Paths) -> list[RunFiles]:
    """Read the runs that can be read; log a warning for each of the others."""
    given = [log_paths] if isinstance(log_paths, str | Path) else log_paths
    runs: list[RunFiles] = []
    failed: list[RunDirectoryError] = []
    for path in dict.fromkeys(path for each in given for path in _runs_in(Path(each))):
        try:
            runs.append(read_run(path))
        except RunDirectoryError as error:
            failed.append(error)
    if not runs:
        none = RunDirectoryError("log_path must name at least one run directory, found none")
        raise failed[0] if failed else none
    left_out = [f"{error}; it is left out" for error in failed]
    for problem in [*left_out, *(problem for run in runs for problem in run.problems)]:
        logger.warning(one_line(problem))
    return runs


def _runs_in(path: Path) -> Sequence[Path]:
    """Return the run directory itself, or the run directories directly inside."""
    inside = sorted(each.parent for each in path.glob(f"*/{CONFIG}"))
    is_run = (path / CONFIG).exists() or (path / METRICS).exists()
    return inside if inside and not is_run else [path]


def _generations(run: RunFiles) -> Iterator[_Row]:
    """Yield a row for each generation in the metrics or the history, in order."""
    rows: dict[int, _Row] = {}
    for metrics in run.metrics:
        generation = metrics.get(GENERATION_KEYS[METRICS], math.nan)
        if generation != generation // 1 or not 0 <= generation <= _LARGEST:
            logger.warning(f"{run.path / METRICS}: a line without a generation is left out")
            continue
        rows[int(generation)] = {**metrics}
    for record in run.records:
        rows.setdefault(record.generation, {}).update(_history(record))
    for generation in sorted(rows):
        rows[generation].pop(GENERATION_KEYS[METRICS], None)
        yield {**rows[generation], "generation": generation}


def _history(record: Record) -> _Row:
    step = record.step
    return {
        "history/fitness_G": list(record.fitness_G),
        "history/terms": len(step.terms),
        "history/decay": step.decay,
        "history/rule": "" if step.rule is None else type(step.rule).__name__,
        "history/fingerprint": f"{record.fingerprint:016x}",
    }


def table_of(rows: Sequence[Mapping[str, object]], first: Sequence[str] = ()) -> "pandas.DataFrame":
    """Return rows as a table with one type per column, as Parquet needs; `first` come first."""
    import pandas  # Slow, and comes with `datasets`, as pyarrow does.

    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    columns = {_text(name): _column([row.get(name) for row in rows]) for name in names}
    return pandas.DataFrame(columns)


def _column(values: Sequence[object]) -> Sequence[object]:
    """Return the values, or their texts if types differ or Parquet cannot hold them."""
    kinds = {type(value) for value in values if value is not None}
    is_huge = any(isinstance(value, int) and abs(value) > _LARGEST for value in values)
    if not is_huge and str not in kinds and (len(kinds) < 2 or kinds == {int, float}):
        return values
    return [None if value is None else _text(str(value)) for value in values]


def _text(text: str) -> str:
    """Return text without unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


@chz.chz
class Frames:
    """Write runs as one table, with a row per generation."""

    log_path: tuple[str, ...] = chz.field(
        doc="run directories, or directories of run directories", metadata=UNNAMED
    )
    output: str = chz.field(default="frames.parquet", doc=".parquet or .csv file to write")


def main(config: Frames) -> None:
    """Write the file, and print what is in it."""
    table = frames(config.log_path)
    write_table(table, Path(config.output))
    what = f"{plural(len(table), 'row')} of {plural(len(set(table['run'])), 'run')}"
    print(f"{what}, with {plural(len(table.columns), 'column')}: {config.output}")


def cli() -> None:
    run_cli(main, Frames)
