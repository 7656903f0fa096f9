"""Curves of runs from their files: what was measured, over what, grouped over seeds.

Runs whose Configs differ in nothing but their seed, and in where they are kept, are one curve; its
name is what tells it from the others. A held-out metric is measured at the start of a generation,
so its x is what was spent on the generations before; that of any other metric includes its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.terminal import one_line
from es_cookbook.runs.reading import RunFiles
from es_cookbook.runs.report.naming import class_name, is_of_training, method_of
from es_cookbook.runs.report.plots import Line

Spent: TypeAlias = Literal["rollouts", "generations", "tokens", "seconds"]
"""What a curve may go over."""
_COUNTS = {"rollouts": "progress/rollouts", "tokens": "progress/tokens"}
_MOST_NAMED = 3
"""Fields in the name of a curve, and those that are named last."""
_SAYS_LITTLE = ("num_generations", "eval_", "dataset.num_", "snapshot_", "engine", "model_name")

_Config: TypeAlias = tuple[tuple[str, str], ...]
"""What runs of one curve have in common: fields and values, as text."""


def points(run: RunFiles, metric: str, over: Spent) -> dict[float, float]:
    """Where the metric was measured, and its values; NaN is left out.

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


def grouped(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """The runs of each curve, by its name: what trained them, and what tells them from others."""
    by_method: dict[str, dict[_Config, list[RunFiles]]] = {}
    for run in runs:
        groups = by_method.setdefault(method_of(run), {})
        groups.setdefault(_alike(run), []).append(run)
    return {
        ", ".join(filter(None, (method, name))): group
        for method, groups in by_method.items()
        for name, group in zip(_names(list(groups)), groups.values(), strict=True)
    }


def lines_of(
    groups: Mapping[str, Sequence[RunFiles]], metric: str, over: Spent, scale: float = 1.0
) -> dict[str, Line]:
    """A curve a group, with values times `scale`, at the points that all runs of it have.

    Seconds differ from run to run: there the n-th measurements are put at their mean.

    Raises:
        ConfigError: The runs of a group were never measured at the same point.
    """
    return {name: _line(runs, metric, over, scale) for name, runs in groups.items()}


def _line(runs: Sequence[RunFiles], metric: str, over: Spent, scale: float) -> Line:
    points_R = [points(run, metric, over) for run in runs]
    if over == "seconds":
        count = min(map(len, points_R))
        x_R_M = [list(each)[:count] for each in points_R]
        first_R_M = [list(each.values())[:count] for each in points_R]
        return Line(np.mean(x_R_M, axis=0), scale * np.array(first_R_M))
    shared = sorted(set(points_R[0]).intersection(*points_R[1:]))
    if not shared:
        raise ConfigError(
            f"log_path: {runs[0].path} and the runs that differ from it in their seed alone were "
            f"never measured after the same number of {over}"
        )
    values_R_M: NDArray[np.float64] = np.array([[each[x] for x in shared] for each in points_R])
    return Line(np.array(shared), scale * values_R_M)


def _alike(run: RunFiles) -> _Config:
    return tuple(
        sorted(
            (path, str(value))
            for path, value in run.config.items()
            if path != "seed" and is_of_training(path)
        )
    )


def _names(configs: Sequence[_Config]) -> list[str]:
    """What tells each Config from the others; "" where there is but one."""
    fields = [dict(config) for config in configs]
    differing = [
        path
        for path in dict.fromkeys(path for each in fields for path in each)
        if len({each.get(path) for each in fields}) > 1
    ]
    # Where another class stands, its fields differ too; they say nothing more.
    classes = [f"{p}." for p in differing if any(class_name(each.get(p)) for each in fields)]
    told = [path for path in differing if not path.startswith(tuple(classes))]
    told.sort(key=lambda path: path.startswith(_SAYS_LITTLE))
    return [_name(each, told[:_MOST_NAMED]) for each in fields]


def _name(fields: Mapping[str, str], paths: Sequence[str]) -> str:
    there = {path: fields[path] for path in paths if path in fields}
    return ", ".join(
        class_name(value) or f"{path.rpartition('.')[2]}={one_line(value)}"
        for path, value in there.items()
    )
