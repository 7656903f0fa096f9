"""The data that the report draws: metrics, fitness, Configs and a sentence for each group of runs.

Runs whose Configs differ only in the seed, and in where and how they are kept and shown, form a
group, whose mean and range the page draws.

Run directories come from strangers: everything except numbers is plain text, and anything too
long is cut, with a sentence that says so.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.terminal import plural
from es_cookbook.plugins.report.curve_names import differing, grouped
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.findings import all_findings
from es_cookbook.runs.tracking.jsonl import CORRECT, MEASURES, duration_in_words
from es_cookbook.runs.tracking.reading import RunFiles, method_of, task_of

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of a generation's fitness, drawn as bands."""
_MOST_ROWS = 20_000
_MOST_KEYS = 500
_MOST_POINTS = 60_000
_LONGEST_VALUE = 500


def page_data(runs: Sequence[RunFiles]) -> dict[str, object]:
    """Return the data of runs and of their groups."""
    groups = grouped(runs)
    firsts = [group[0] for group in groups.values()]
    fields = differing(firsts)
    numbers = {id(run): number for number, run in enumerate(runs)}
    return {
        "runs": [_charted(run) for run in runs],
        "groups": [
            {
                "label": label,
                "runs": [numbers[id(run)] for run in group],
                "sentence": sentence(group),
                "differs": {field: _text(group[0].config.get(field, "(none)")) for field in fields},
            }
            for label, group in groups.items()
        ],
        "quantiles": QUANTILES,
    }


def _charted(run: RunFiles) -> dict[str, object]:
    """Return the data of one run."""
    problems = list(run.problems)
    columns = _columns(_thinned(run.metrics, problems), problems)
    if not run.metrics:
        problems.append("it has measured nothing yet, so there is nothing to draw")
    return {
        "path": str(run.path),
        "name": run.path.resolve().name,
        "state": run.state,
        "gradients": run.is_gradient,
        "seed": run.config.get("seed") if type(run.config.get("seed")) is int else None,
        "done": run.generations_done,
        "planned": run.num_generations,
        "mirrored": run.config.get("optimizer.antithetic") is True,
        "columns": columns,
        "fitness": _fitness(run),
        "config": [[key, _text(value)] for key, value in run.config.items() if key],
        "problems": problems,
        "findings": list(all_findings(run.metrics)),
        "seconds": _rounded(_seconds(run)),
    }


def sentence(runs: Sequence[RunFiles]) -> str:
    """Return a sentence on cost and gain of a group of runs, as means over the runs."""
    done = [run.generations_done for run in runs]
    length = plural(max(done), "generation")
    if len(runs) > 1:
        each = f"{length} each" if min(done) == max(done) else f"up to {length}"
        length = f"{len(runs)} runs: {each}"
    first = f"{task_of(runs[0].config)} by {method_of(runs[0])}"
    parts = [f"{first}, {length}" if len(runs) > 1 else f"{first}: {length}"]
    for key, what in (("progress/rollouts", "rollouts"), ("progress/tokens", "sampled tokens")):
        if counts := [ends[1] for run in runs if (ends := _ends(run.metrics, key))]:
            parts.append(f"{fmean(counts):,.0f} {what}")
    if seconds := [took for run in runs if (took := _seconds(run))]:
        parts.append(duration_in_words(fmean(seconds)))
    told = ", ".join(parts)
    gain = _gain(runs)
    return f"{told}. {gain}" if gain else f"{told}."


def _seconds(run: RunFiles) -> float:
    times = (row.get("time/total", math.nan) for row in run.metrics)
    return math.fsum(filter(math.isfinite, times))


def _gain(runs: Sequence[RunFiles]) -> str:
    for key, what in zip(MEASURES, ("Held-out correct", "Held-out reward", "Reward"), strict=True):
        ends = [found for run in runs if (found := _ends(run.metrics, key))]
        if not ends:
            continue
        is_share = key == CORRECT and all(0 <= value <= 1 for end in ends for value in end)
        scale, digits, unit, points = (100, 1, " %", " points") if is_share else (1, 3, "", "")
        first, last = (fmean(values) * scale for values in zip(*ends, strict=True))
        lasts = [scale * value for _, value in ends]
        told = f"{what}: {first:.{digits}f}{unit} → {last:.{digits}f}{unit}"
        over = f"; {min(lasts):.{digits}f} to {max(lasts):.{digits}f} over runs"
        return f"{told} ({last - first:+.{digits}f}{points}{over if len(ends) > 1 else ''})."
    return ""


def _ends(rows: Sequence[Mapping[str, float]], key: str) -> tuple[float, float] | None:
    values = [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]
    return (values[0], values[-1]) if values else None


def _thinned(
    rows: Sequence[dict[str, float]], problems: list[str]
) -> Sequence[Mapping[str, float]]:
    """Return all rows, or evenly spaced ones and the last if a page cannot hold all."""
    if len(rows) <= _MOST_ROWS:
        return rows
    step = math.ceil(len(rows) / _MOST_ROWS)
    problems.append(f"it has {len(rows):,} generations; one in {step} is drawn")
    return [*rows[:-1:step], rows[-1]]


def _columns(
    rows: Sequence[Mapping[str, float]], problems: list[str]
) -> dict[str, list[float | None]]:
    """Return each metric's value in every row; None if missing or not finite."""
    counts = Counter(key for row in rows for key in row)
    keys = list(counts)
    if len(keys) > _MOST_KEYS:
        problems.append(f"it has {len(keys):,} metrics; the {_MOST_KEYS} most frequent are drawn")
        keys = [key for key, _ in counts.most_common(_MOST_KEYS)]
    numbers = [row.get(GENERATION, float(i)) for i, row in enumerate(rows)]
    columns = {
        key: [_rounded(row.get(key, math.nan)) for row in rows] for key in keys if key != GENERATION
    }
    return {GENERATION: [_rounded(number) for number in numbers], **columns}


def _fitness(run: RunFiles) -> dict[str, object] | None:
    """Return quantiles of each generation's fitness, and points of single genomes."""
    records = run.records
    if len(records) > _MOST_ROWS:
        records = records[:: math.ceil(len(records) / _MOST_ROWS)]
    drawn = [np.array(record.fitness_G, np.float64) for record in records]
    num_points = sum(len(values_G) for values_G in drawn)
    if not num_points:
        return None
    step = math.ceil(num_points / _MOST_POINTS)
    return {
        "generations": [record.generation for record in records],
        "quantiles": [_quantiles(values_G) for values_G in drawn],
        "step": step,
        "genomes": [
            [_rounded(float(value), 4) for value in values_G[i % step :: step]]
            for i, values_G in enumerate(drawn)
        ],
    }


def _quantiles(values_G: NDArray[np.float64]) -> list[float | None]:
    finite_G = values_G[np.isfinite(values_G)]
    if not len(finite_G):
        return [None] * len(QUANTILES)
    return [_rounded(float(value)) for value in np.quantile(finite_G, QUANTILES)]


def _rounded(value: float, digits: int = 6) -> float | None:
    """Return the value with so many digits; None if it is not finite."""
    if not math.isfinite(value):
        return None
    is_whole = value == int(value) and abs(value) < 2**53
    return int(value) if is_whole else float(f"{value:.{digits}g}")


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
