"""Curves of a metric over cost, from the files of runs, grouped over seeds; and a table of them.

Runs whose Configs differ only in their seed and in their place are one curve, named by the fields
in which it differs from the others. A held-out metric is measured at the start of a generation, so
its x is the cost of the generations before; for any other metric it includes its own. Three seeds
are too few for a useful confidence interval, so mean, lowest and highest are shown.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.terminal import markdown
from es_cookbook.runs.tracking.reading import RunFiles

Spent: TypeAlias = Literal["rollouts", "generations", "tokens", "seconds"]
"""The x axis of a curve."""
_COUNTS = {"rollouts": "progress/rollouts", "tokens": "progress/tokens"}


def is_share(metric: str) -> bool:
    """Return whether a metric is shown in percent, as those of Envs are."""
    return "env/" in metric


def points(run: RunFiles, metric: str, over: Spent) -> dict[float, float]:
    """Return a metric's values by position on the x axis, without NaN.

    Raises:
        ConfigError: The run did not measure it; names the nearest.
    """
    found: dict[float, float] = {}
    before = 0.0
    for number, row in enumerate(run.metrics):
        after = _after(row, number, before, over)
        value = row.get(metric, math.nan)
        x = before if metric.startswith("test/") else after
        if math.isfinite(value) and math.isfinite(x):
            found[x] = value
        before = after if math.isfinite(after) else before
    if not found:
        known = sorted({key for row in run.metrics for key in row})
        raise ConfigError(
            f"log_path: {run.path} has not measured {metric} over {over}: "
            f"{nearest(metric, known) if known else 'it has measured nothing'}"
        )
    return found


def _after(row: Mapping[str, float], number: int, before: float, over: Spent) -> float:
    if over == "generations":
        return number + 1.0
    if over == "seconds":
        return before + row.get("time/total", 0.0)
    return row.get(_COUNTS[over], math.nan)


def shared_points(
    runs: Sequence[RunFiles], metric: str, over: Spent
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `x_M` and `values_R_M` of some runs, at the points that all of them have.

    Seconds differ between runs, so the n-th measurements are placed at their mean.

    Raises:
        ConfigError: They were never measured at the same point.
    """
    points_R = [points(run, metric, over) for run in runs]
    if over == "seconds":
        count = min(map(len, points_R))
        x_R_M = [list(each)[:count] for each in points_R]
        first_R_M = [list(each.values())[:count] for each in points_R]
        return np.mean(x_R_M, axis=0), np.array(first_R_M)
    shared = sorted(set(points_R[0]).intersection(*points_R[1:]))
    if not shared:
        raise ConfigError(
            f"log_path: {runs[0].path} and the runs that differ from it in their seed alone were "
            f"never measured after the same number of {over}"
        )
    return np.array(shared), np.array([[each[x] for x in shared] for each in points_R])


def table(groups: Mapping[str, Sequence[RunFiles]], metric: str) -> str:
    """Return a Markdown table with the final metric and the cost of each group of runs.

    Raises:
        ConfigError: A run did not measure the metric, or does not count rollouts and time.
    """
    head = ["", "runs", f"{metric} at the end", "rollouts", "s a generation"]
    return markdown(head, [[name, *_cells(runs_R, metric)] for name, runs_R in groups.items()])


def _cells(runs_R: Sequence[RunFiles], metric: str) -> list[str]:
    _, values_R_M = shared_points(runs_R, metric, "rollouts")
    rollouts, seconds = map(fmean, zip(*map(_costs, runs_R), strict=True))
    at_the_end = mean_and_range(values_R_M[:, -1].tolist(), is_share(metric))
    return [str(len(runs_R)), at_the_end, f"{rollouts:.0f}", f"{seconds:.3g}"]


def _costs(run: RunFiles) -> tuple[float, float]:
    """Return the rollouts of a run, and its seconds per generation."""
    seconds = [row["time/total"] for row in run.metrics if "time/total" in row]
    rollouts = run.metrics[-1].get("progress/rollouts", math.nan) if seconds else math.nan
    if math.isnan(rollouts):
        raise ConfigError(f"{run.path} does not count rollouts and time: it cannot be compared")
    return rollouts, fmean(seconds)


def mean_and_range(values_R: Sequence[float], share: bool = True) -> str:
    """Return `mean (lowest … highest)` over runs as text; a share is in percent."""
    mean, low, high = fmean(values_R), min(values_R), max(values_R)
    if share:
        return f"{100 * mean:.1f} % ({100 * low:.1f} … {100 * high:.1f})"
    return f"{mean:.4g} ({low:.4g} … {high:.4g})"
