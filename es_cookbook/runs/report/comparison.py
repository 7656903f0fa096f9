"""Comparison of runs: a table and curves from the files that they wrote, and nothing else.

Several runs that differ in their seed alone are one line of the table and one curve: the mean over
them, with the lowest and the highest. Three seeds are too few for a useful confidence interval, so
the range is shown.

A held-out metric is measured at the start of a generation, so its x is the number of rollouts of
the generations before. `over the run` is the mean height of the curve over rollouts (trapezoids),
`at the end` its last point.

Arrays with `_R` have one entry per run, with `_M` one per measurement.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import markdown
from es_cookbook.runs.directory import HISTORY, METRICS
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics

_COUNT = "progress/rollouts"


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A metric over rollouts, of runs that differ in their seed.

    Attributes:
        rollouts_M: number of rollouts before each measurement.
        values_R_M: measured values, runs x measurements.
    """

    rollouts_M: NDArray[np.int64]
    values_R_M: NDArray[np.float64]

    @property
    def heights_R(self) -> list[float]:
        """Mean height of each run's curve over rollouts."""
        span = float(self.rollouts_M[-1] - self.rollouts_M[0])
        if not span:
            return [float(value) for value in self.values_R_M[:, -1]]
        areas_R = [np.trapezoid(values_M, self.rollouts_M) for values_M in self.values_R_M]
        return [float(area) / span for area in areas_R]


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Runs that differ in their seed, as one line of the table.

    Attributes:
        curve: of the metric.
        rollouts_R: training rollouts of each run.
        seconds_R: mean of a generation's `time/total`.
        optimizer_share_R: share of that in `time/ask` and `time/tell`; NaN where not measured.
        terms_R: mean terms per step; their noise is generated again wherever the centre is kept.
    """

    curve: Curve
    rollouts_R: list[int]
    seconds_R: list[float]
    optimizer_share_R: list[float]
    terms_R: list[float]


def summarise(log_paths_R: Sequence[Path], metric: str) -> Summary:
    """Read the files of runs that differ in their seed alone.

    `metric` is a key of `metrics.jsonl` that is measured at the start of a generation.

    Raises:
        ConfigError: A run without that metric, or runs measured at different times.
    """
    measured_R: list[list[tuple[int, float]]] = []
    rollouts_R: list[int] = []
    seconds_R: list[float] = []
    share_R: list[float] = []
    terms_R: list[float] = []
    for log_path in log_paths_R:
        rows = read_metrics(log_path / METRICS)
        generations = [row for row in rows if "time/total" in row]
        if not generations or any(math.isnan(row.get(_COUNT, math.nan)) for row in rows):
            raise ConfigError(
                f"{log_path / METRICS} does not count rollouts and time, so it cannot be compared"
            )
        before = [0, *(int(row[_COUNT]) for row in rows)]
        measured = [(n, row[metric]) for n, row in zip(before, rows, strict=False) if metric in row]
        if not measured:
            raise ConfigError(f"{log_path / METRICS} has no {metric}, so it cannot be compared")
        measured_R.append(measured)
        rollouts_R.append(before[-1])
        total = math.fsum(row["time/total"] for row in generations)
        optimizer = math.fsum(
            row.get(key, math.nan) for row in generations for key in ("time/ask", "time/tell")
        )
        seconds_R.append(total / len(generations))
        share_R.append(optimizer / total if total else math.nan)
        terms_S = [len(record.step.terms) for record in read_history(log_path / HISTORY)]
        terms_R.append(fmean(terms_S) if terms_S else math.nan)
    times_R = [[n for n, _ in measured] for measured in measured_R]
    for log_path, times in zip(log_paths_R, times_R, strict=True):
        if times != times_R[0]:
            raise ConfigError(
                f"{log_path} was measured after {times} rollouts and {log_paths_R[0]} after "
                f"{times_R[0]}; runs of one curve must have the same Config but for the seed"
            )
    curve = Curve(np.array(times_R[0], np.int64), np.array([[v for _, v in m] for m in measured_R]))
    return Summary(curve, rollouts_R, seconds_R, share_R, terms_R)


def is_share(metric: str) -> bool:
    """Whether it is shown in percent, as the metrics of Envs are."""
    return "env/" in metric


def table(summaries: Mapping[str, Summary], metric: str) -> str:
    """The summaries, by name, as a Markdown table; `mean (lowest … highest)` over runs."""
    share = is_share(metric)
    head = ["", "runs", f"{metric} at the end", "over the run", "rollouts", "s a generation"]
    rows = [
        [
            name,
            str(len(summary.rollouts_R)),
            mean_and_range(summary.curve.values_R_M[:, -1].tolist(), share),
            mean_and_range(summary.curve.heights_R, share),
            f"{fmean(summary.rollouts_R):.0f}",
            f"{fmean(summary.seconds_R):.3g}",
            f"{100 * fmean(summary.optimizer_share_R):.2g} %",
            f"{fmean(summary.terms_R):.4g}",
        ]
        for name, summary in summaries.items()
    ]
    return markdown([*head, "ask + tell of it", "terms a step"], rows)


def mean_and_range(values_R: Sequence[float], share: bool = True) -> str:
    """`mean (lowest … highest)` over runs; a share is in percent."""
    mean, low, high = fmean(values_R), min(values_R), max(values_R)
    if share:
        return f"{100 * mean:.1f} % ({100 * low:.1f} … {100 * high:.1f})"
    return f"{mean:.4g} ({low:.4g} … {high:.4g})"
