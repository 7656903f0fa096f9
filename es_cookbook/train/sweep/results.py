"""What came of a sweep's runs: a row a run in a Parquet file, a line a trial in a Markdown table.

Everything is read from the run directories. The metric's value is its last; the spread over seeds
is the sample standard deviation, shown from two runs on. Runs that were stopped early or failed
are told, and do not count.
"""

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, TypeAlias

from es_cookbook.common.errors import HistoryError
from es_cookbook.common.terminal import markdown
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.report.curves import is_share
from es_cookbook.runs.report.frames import table_of, write_table
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.train.sweep.search import Value

Curve: TypeAlias = Sequence[tuple[int, float]]
"""(generation, metric) of a run, in order; no NaN."""
State: TypeAlias = Literal[
    "waiting", "running", "interrupted", "complete", "pruned", "skipped", "failed"
]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A run of a sweep, as far as it has come.

    Attributes:
        run: its directory's name, `trial` its trial's number.
        state: pruned: it was stopped early; skipped: another seed of its trial was.
        generations: how many it recorded.
        final: the metric's last value, `best` its highest; NaN where it was not measured.
        seconds: of its generations.
        problem: why it failed.
    """

    run: str
    trial: int
    options: Mapping[str, Value]
    seed: int
    state: State
    generations: int
    metric: str
    final: float
    best: float
    seconds: float
    problem: str


def measured(log_path: Path) -> list[dict[str, float]]:
    """The metrics of a run, of one in progress too; none where they cannot be read."""
    with contextlib.suppress(HistoryError):
        return read_metrics(log_path / METRICS)
    return []


def curve(rows: Sequence[Mapping[str, float]], metric: str) -> Curve:
    """(generation, metric), where that was measured."""
    pairs = [(row.get(GENERATION, math.nan), row.get(metric, math.nan)) for row in rows]
    return [(int(g), value) for g, value in pairs if math.isfinite(g) and math.isfinite(value)]


def write_results(log_path: Path, results: Sequence[Result], metric: str) -> str:
    """Write `results.parquet` and `results.md`; returns the table of the latter.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    rows: list[dict[str, object]] = []
    for result in results:
        row = dataclasses.asdict(result)
        options = row.pop("options")
        rows.append({"run": result.run, "trial": result.trial, **options, **row})
    write_table(table_of(rows), log_path / "results.parquet")
    text = table(results, metric)
    replace_file(log_path / "results.md", [text.encode(), b"\n"])
    return text


def table(results: Sequence[Result], metric: str) -> str:
    """A line a trial as Markdown, the best first."""
    by_trial = itertools.groupby(results, key=lambda result: result.trial)
    trials = [list(of_trial) for _, of_trial in by_trial]
    names = list(results[0].options) if results else []
    heads = [*names, f"{metric}, mean ± spread", "best", "runs", "minutes"]
    return markdown(heads, [_cells(trial_R, metric) for trial_R in sorted(trials, key=_rank)])


def mean_of_complete(results_R: Sequence[Result]) -> float:
    """Mean of the final values of runs that are complete; NaN where none is."""
    values = [result.final for result in results_R if result.state == "complete"]
    return fmean(values) if values else math.nan


def _rank(trial_R: Sequence[Result]) -> tuple[bool, float]:
    mean = mean_of_complete(trial_R)
    return math.isnan(mean), -mean


def _cells(trial_R: Sequence[Result], metric: str) -> list[str]:
    complete_R = [result for result in trial_R if result.state == "complete"]
    finals, bests = ([getattr(r, name) for r in complete_R] for name in ("final", "best"))
    scale, unit = (100, " %") if is_share(metric) else (1, "")

    def shown(value: float) -> str:
        return f"{scale * value:.1f}" if unit else f"{value:.4g}"

    spread = f" ± {shown(stdev(finals))}" if len(finals) > 1 else ""
    counts = Counter(result.state for result in trial_R)
    return [
        *(_text(value) for value in trial_R[0].options.values()),
        f"{shown(fmean(finals))}{spread}{unit}" if finals else "–",
        f"{shown(max(bests))}{unit}" if bests else "–",
        ", ".join(f"{count} {state}" for state, count in counts.items()),
        f"{math.fsum(result.seconds for result in trial_R) / 60:.1f}",
    ]


def _text(value: Value) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", r"\|")
