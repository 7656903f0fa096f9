"""Runs as tables of pandas: one row a run and generation, or one a recorded rollout.

    from es_cookbook.runs import frames

    table = frames(["runs/a", "runs/b"])
    table.groupby("optimizer.sigma")["test/env/all/correct"].last()
    frames("runs/a", of="rollouts").sort_values("reward")

Columns of both: `run` (its directory), `generation`, `seed`, and every field in which the Configs
differ, by its dotted path (`optimizer.sigma`). A generation's row has all that `metrics.jsonl` has,
under the same keys, and of its history line `history/...`: fitness, terms, decay and fingerprint.
Behind the last generation there is one more row, with the last evaluation.

Everything is read as `es_cookbook.runs.tracking.reading` does: what is torn, foreign or of a newer
version is left out, with a warning in a sentence.
"""

import io
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, RunDirectoryError, nearest, not_installed
from es_cookbook.common.terminal import one_line
from es_cookbook.runs.directory.directory import CONFIG, GENERATION_KEYS, METRICS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.tracking.naming import is_of_training
from es_cookbook.runs.tracking.reading import RunFiles, read_run

if TYPE_CHECKING:
    import pandas

Of: TypeAlias = Literal["generations", "rollouts"]
Paths: TypeAlias = str | Path | Iterable[str | Path]
SUFFIXES = (".parquet", ".csv")
_CLASS = "config"
"""What the class of the Config itself is called, which stands at no path."""
_LARGEST = 2**63 - 1
"""Whole numbers above it have no column in a Parquet file."""
_Row: TypeAlias = dict[str, object]

logger = logging.getLogger(__name__)


def frames(log_paths: Paths, of: Of = "generations") -> "pandas.DataFrame":
    """Some runs as one table, in their order; see the module's text for its columns.

    Args:
        log_paths: run directories, or directories of run directories, such as a sweep's.
        of: what a row is: a generation of a run, or a rollout that it recorded. A rollout's has
            `problem`, `genome`, `attempt`, `tags`, `reward`, what was `asked` and `answered`, and
            the sums over its turns of what its Env measured, `env/...`.

    Raises:
        RunDirectoryError: None of them can be read.
        ConfigError: pandas is not installed.
    """
    if of not in ("generations", "rollouts"):
        raise ConfigError(f"of={of!r}: {nearest(of, ['generations', 'rollouts'])}")
    runs = _read(log_paths)
    fields = _differing(runs)
    rows = [
        {"run": _text(str(run.path)), **row, **_own(run, fields)}
        for run in runs
        for row in (_rollouts(run) if of == "rollouts" else _generations(run))
    ]
    return table_of(rows, first=("run", "generation", *(path or _CLASS for path in fields)))


def write_table(table: "pandas.DataFrame", output: Path) -> None:
    """Write a table as a Parquet or CSV file, whole or not at all; a former one is replaced.

    Raises:
        ConfigError: The name ends otherwise, or pyarrow is not installed.
        RunDirectoryError: The disk refuses.
    """
    if output.suffix not in SUFFIXES:
        raise ConfigError(
            f"output must be a file whose name ends in {' or '.join(SUFFIXES)}, found {output}"
        )
    if output.suffix == ".csv":
        replace_file(output, [table.to_csv(index=False).encode("utf-8", "replace")])
        return
    written = io.BytesIO()
    try:
        table.to_parquet(written, engine="pyarrow", index=False)
    except ImportError as error:
        raise not_installed("Parquet", "pyarrow", "es-cookbook[frames]") from error
    replace_file(output, [written.getvalue()])


def _read(log_paths: Paths) -> list[RunFiles]:
    """The runs that can be read; what cannot is warned of, if any run is left."""
    given = [log_paths] if isinstance(log_paths, str | Path) else log_paths
    paths = dict.fromkeys(path for each in given for path in _runs_in(Path(each)))
    runs: list[RunFiles] = []
    failed: list[RunDirectoryError] = []
    for path in paths:
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
    """The run directory itself, or those directly in it where it is none."""
    inside = sorted(each.parent for each in path.glob(f"*/{CONFIG}"))
    is_run = (path / CONFIG).exists() or (path / METRICS).exists()
    return inside if inside and not is_run else [path]


def _differing(runs: Sequence[RunFiles]) -> list[str]:
    """Paths of the fields that are not the same in all Configs, and the seed."""
    paths = dict.fromkeys(path for run in runs for path in run.config)
    return [
        path
        for path in filter(is_of_training, paths)
        if path == "seed" or len({repr(run.config.get(path)) for run in runs}) > 1
    ]


def _own(run: RunFiles, fields: Sequence[str]) -> _Row:
    return {path or _CLASS: run.config.get(path) for path in fields}


def _generations(run: RunFiles) -> Iterator[_Row]:
    """A row for each generation that metrics or history have, in order."""
    rows: dict[int, _Row] = {}
    for metrics in run.metrics:
        generation = metrics.get(GENERATION_KEYS[METRICS], math.nan)
        if generation != generation // 1 or not 0 <= generation <= _LARGEST:
            logger.warning(f"{run.path / METRICS}: a line that names no generation is left out")
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


def _rollouts(run: RunFiles) -> Iterator[_Row]:
    for rollout in run.rollouts(logger.warning):
        generation = cast(int, rollout["generation"])
        if not 0 <= generation <= _LARGEST:
            continue
        turns = [turn for turn in _list(rollout.get("turns")) if isinstance(turn, dict)]
        told = [cast("dict[str, object]", turn) for turn in turns]
        yield {
            "generation": generation,
            **{name: _number(rollout.get(name)) for name in ("problem", "genome", "attempt")},
            "tags": ", ".join(map(str, _list(rollout.get("tags")))),
            "reward": _number(rollout.get("reward")),
            "lost": rollout.get("lost", ""),
            "turns": len(told),
            "asked": "\n".join(str(turn.get("prompt", turn.get("added", ""))) for turn in told),
            "answered": "\n".join(str(turn.get("action", "")) for turn in told),
            "stop_reason": str(told[-1].get("stop_reason", "")) if told else "",
            **_measured(told),
        }


def _measured(turns: Sequence[Mapping[str, object]]) -> _Row:
    """What an Env measured, summed over the turns."""
    sums: dict[str, float] = {}
    for turn in turns:
        metrics = turn.get("metrics")
        for name, value in cast(
            "dict[str, object]", metrics if isinstance(metrics, dict) else {}
        ).items():
            sums[f"env/{name}"] = sums.get(f"env/{name}", 0.0) + _number(value)
    return {**sums}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _number(value: object) -> float:
    """A number of a line that anybody may have written; NaN where it is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    return float(value) if abs(value) <= _LARGEST else math.nan


def table_of(rows: Sequence[Mapping[str, object]], first: Sequence[str] = ()) -> "pandas.DataFrame":
    """Plain values as a table that Parquet can hold: columns of one type each, some of them first.

    The others are in the order of their appearance.
    """
    try:
        import pandas
    except ImportError as error:
        raise not_installed("a table of runs", "pandas", "es-cookbook[frames]") from error
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    columns = {_text(name): _column([row.get(name) for row in rows]) for name in names}
    return pandas.DataFrame(columns)


def _column(values: Sequence[object]) -> Sequence[object]:
    """Values of one type, or None; where they are of several, their texts."""
    kinds = {type(value) for value in values if value is not None}
    numbers = [math.nan if value is None else value for value in values]
    if kinds <= {float, int} and all(_fits(cast(float, number)) for number in numbers):
        is_whole = kinds == {int} and None not in values
        return numbers if is_whole else [float(cast(float, number)) for number in numbers]
    if len(kinds) == 1 and kinds <= {bool, list}:
        return values
    return [None if value is None else _text(str(value)) for value in values]


def _fits(number: float) -> bool:
    return isinstance(number, float) or abs(number) <= _LARGEST


def _text(text: str) -> str:
    """Text that UTF-8 can hold; a file may name halves of characters."""
    return text.encode("utf-8", "replace").decode("utf-8")
