"""What the report draws of runs, as plain values: metrics, fitness, Configs, and a sentence each.

Runs whose Configs are equal but for the seed, and for where and how they are kept and shown, are a
group: the page draws their mean and range.

Run directories come from strangers: numbers are all that is taken as more than text, and whatever
has no end is cut, with a sentence that says so.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.terminal import plural
from es_cookbook.runs.reading import RunFiles
from es_cookbook.runs.report.naming import is_of_training, recipe_of
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.findings import all_findings
from es_cookbook.runs.tracking.jsonl import CORRECT, MEASURES

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Of a generation's genomes, drawn as bands."""
_MOST_ROWS = 20_000
_MOST_KEYS = 500
_MOST_FIELDS = 2_000
_MOST_POINTS = 60_000
_LONGEST_VALUE = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Charted:
    """A run as the page draws it; `plain` is JSON, the rest names it and puts it in a group."""

    plain: dict[str, object]
    task: str
    method: str
    fields: Mapping[str, str]
    ends: Mapping[str, tuple[float, float]]
    seconds: float


def charted(run: RunFiles) -> Charted:
    """What of a run is drawn."""
    problems = list(run.problems)
    rows = _thinned(run.metrics, problems)
    columns = _columns(rows, problems)
    fields = {
        key: _text(value) for key, value in list(run.config.items())[:_MOST_FIELDS] if key != ""
    }
    if len(run.config) > _MOST_FIELDS:
        problems.append(f"its Config has {len(run.config):,} fields; {_MOST_FIELDS:,} are shown")
    if not run.metrics:
        problems.append("it has measured nothing yet, so there is nothing to draw")
    seconds = math.fsum(s for row in rows if math.isfinite(s := row.get("time/total", math.nan)))
    name = run.path.resolve().name
    plain: dict[str, object] = {
        "path": str(run.path),
        "name": name,
        "state": run.state,
        "gradients": run.is_gradient,
        "seed": run.config.get("seed") if type(run.config.get("seed")) is int else None,
        "done": run.generations_done,
        "planned": run.num_generations,
        "mirrored": run.config.get("optimizer.antithetic") is True,
        "columns": columns,
        "fitness": _fitness(run),
        "config": [[key, value] for key, value in fields.items()],
        "problems": problems,
        "findings": list(all_findings(run.metrics)),
        "seconds": _rounded(seconds),
    }
    ends = {key: end for key in columns if (end := _ends(rows, key)) is not None}
    return Charted(plain, recipe_of(run.config) or name, _method(run), fields, ends, seconds)


def page_data(runs: Sequence[Charted]) -> dict[str, object]:
    """All that the page draws of runs, in groups by Config, with a sentence about each group."""
    grouped: dict[object, list[int]] = {}
    for number, run in enumerate(runs):
        grouped.setdefault(_group_key(run, number), []).append(number)
    members = list(grouped.values())
    labels = _labels([runs[numbers[0]] for numbers in members])
    differing = _differing([runs[numbers[0]].fields for numbers in members])
    return {
        "runs": [run.plain for run in runs],
        "groups": [
            {
                "label": label,
                "runs": numbers,
                "sentence": sentence([runs[number] for number in numbers]),
                "differs": {
                    field: runs[numbers[0]].fields.get(field, "(none)") for field in differing
                },
            }
            for label, numbers in zip(labels, members, strict=True)
        ],
        "quantiles": QUANTILES,
    }


def sentence(runs: Sequence[Charted]) -> str:
    """What the runs of a group did, and what that brought: the means of several."""
    first = runs[0]
    done = [int(run.plain["done"]) for run in runs if isinstance(run.plain["done"], int)]
    length = plural(max(done), "generation")
    parts = [f"{first.task} by {first.method}: {length}"]
    if len(runs) > 1:
        parts[0] = f"{first.task} by {first.method}, {len(runs)} runs: {length} each"
        if min(done) < max(done):
            parts[0] = parts[0].removesuffix(f"{length} each") + f"up to {length}"
    for key, what in (("progress/rollouts", "rollouts"), ("progress/tokens", "sampled tokens")):
        if counts := [run.ends[key][1] for run in runs if key in run.ends]:
            parts.append(f"{fmean(counts):,.0f} {what}")
    if seconds := [run.seconds for run in runs if run.seconds]:
        parts.append(_duration(fmean(seconds)))
    told = ", ".join(parts)
    gain = _gain(runs)
    return f"{told}. {gain}" if gain else f"{told}."


def _gain(runs: Sequence[Charted]) -> str:
    for key in MEASURES:
        ends = [run.ends[key] for run in runs if key in run.ends]
        if not ends:
            continue
        before, after = fmean(first for first, _ in ends), fmean(last for _, last in ends)
        what = {CORRECT: "Held-out correct", "test/reward/mean": "Held-out reward"}.get(
            key, "Reward"
        )
        if key == CORRECT and all(0 <= value <= 1 for end in ends for value in end):
            gain = f"{100 * (after - before):+.1f} points"
            told = f"{what}: {100 * before:.1f} % → {100 * after:.1f} % ({gain}"
            low, high = (f"{100 * choice(last for _, last in ends):.1f}" for choice in (min, max))
        else:
            told = f"{what}: {before:.3f} → {after:.3f} ({after - before:+.3f}"
            low, high = (f"{choice(last for _, last in ends):.3f}" for choice in (min, max))
        return f"{told}; {low} to {high} over runs)." if len(ends) > 1 else f"{told})."
    return ""


def _ends(rows: Sequence[Mapping[str, float]], key: str) -> tuple[float, float] | None:
    values = [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]
    return (values[0], values[-1]) if values else None


def _thinned(
    rows: Sequence[dict[str, float]], problems: list[str]
) -> Sequence[Mapping[str, float]]:
    """All rows, or evenly spaced ones and the last where there are more than a page can hold."""
    if len(rows) <= _MOST_ROWS:
        return rows
    step = math.ceil(len(rows) / _MOST_ROWS)
    problems.append(f"it has {len(rows):,} generations; one in {step} is drawn")
    return [*rows[:-1:step], rows[-1]]


def _columns(
    rows: Sequence[Mapping[str, float]], problems: list[str]
) -> dict[str, list[float | None]]:
    """Metric -> its value in every row; None where it was not measured or is not finite."""
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
    """Quantiles of every generation's fitness, and single genomes, if they are not too many.

    Fitness in z-scores has the same mean and spread in every generation. Where mean and spread of
    the genomes' rewards give their rewards back, those are drawn.
    """
    records = run.records
    if len(records) > _MOST_ROWS:
        records = records[:: math.ceil(len(records) / _MOST_ROWS)]
    fitness = [np.array(record.fitness_G, np.float64) for record in records]
    rewards = (
        _as_rewards(fitness, [run.metrics[record.generation] for record in records])
        if (records and records[-1].generation < len(run.metrics))
        else None
    )
    drawn = fitness if rewards is None else rewards
    num_points = sum(len(values_G) for values_G in drawn)
    if not num_points:
        return None
    step = math.ceil(num_points / _MOST_POINTS)
    return {
        "what": "fitness" if rewards is None else "mean reward",
        "generations": [record.generation for record in records],
        "quantiles": [_quantiles(values_G) for values_G in drawn],
        "step": step,
        "genomes": [
            [_rounded(float(value), 4) for value in values_G[i % step :: step]]
            for i, values_G in enumerate(drawn)
        ],
    }


def _as_rewards(
    fitness: Sequence[NDArray[np.float64]], rows: Sequence[Mapping[str, float]]
) -> list[NDArray[np.float64]] | None:
    """Rewards of genomes, from z-scores; None where the rows do not confirm that they are."""
    rewards: list[NDArray[np.float64]] = []
    for values_G, row in zip(fitness, rows, strict=True):
        mean, std, low, high = (
            row.get(f"reward/{name}", math.nan)
            for name in ("mean", "std_genomes", "min_genome", "max_genome")
        )
        rewards_G = values_G * std + mean
        if not len(values_G) or not np.allclose(
            (np.nanmin(rewards_G), np.nanmax(rewards_G))
            if np.isfinite(rewards_G).any()
            else (0, 0),
            (low, high),
            atol=1e-6,
        ):
            return None
        rewards.append(rewards_G)
    return rewards


def _quantiles(values_G: NDArray[np.float64]) -> list[float | None]:
    finite_G = values_G[np.isfinite(values_G)]
    if not len(finite_G):
        return [None] * len(QUANTILES)
    return [_rounded(float(value)) for value in np.quantile(finite_G, QUANTILES)]


def _rounded(value: float, digits: int = 6) -> float | None:
    """With so many digits, which is more than can be seen; None where JSON has no number for it."""
    if not math.isfinite(value):
        return None
    return (
        int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.{digits}g}")
    )


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _method(run: RunFiles) -> str:
    """An optimizer's module, or what trained by gradients."""
    of_run, optimizer = str(run.config.get("", "")), run.config.get("optimizer")
    if found := re.match(r"es_cookbook\.(?:baselines|commands\.gradients)\.(\w+)", of_run):
        return found[1]
    if isinstance(optimizer, str) and (found := re.match(r"[\w.]*?(\w+):\w+$", optimizer)):
        return found[1]
    return "gradients" if run.is_gradient else "evolution strategies"


def _group_key(run: Charted, number: int) -> object:
    if not run.fields:
        return number
    return tuple(pair for pair in run.fields.items() if _tells_groups(pair[0]))


def _tells_groups(field: str) -> bool:
    return field != "seed" and is_of_training(field)


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Fields that differ among the Configs that could be read; another class explains its own."""
    configs = [config for config in configs if config]
    found: list[str] = []
    for key in dict.fromkeys(key for config in configs for key in config):
        is_explained = key.startswith(tuple(f"{field}." for field in found))
        if is_explained or not _tells_groups(key):
            continue
        if len({config.get(key) for config in configs}) > 1:
            found.append(key)
    return found[:200]


def _labels(firsts: Sequence[Charted]) -> list[str]:
    """A name for every group: task and method, as far as they differ, and then what else does."""
    tasks = {run.task for run in firsts}
    names = [f"{run.task}, {run.method}" if len(tasks) > 1 else run.method for run in firsts]
    labels: list[str] = []
    for name, run in zip(names, firsts, strict=True):
        alike = [other for other, theirs in zip(firsts, names, strict=True) if theirs == name]
        fields = _differing([other.fields for other in alike]) if len(alike) > 1 else []
        told = [f"{field.rpartition('.')[2]}={run.fields.get(field, '')[:40]}" for field in fields]
        labels.append(", ".join([name, *told[:2]]))
    repeated = Counter(labels)
    return [
        f"{label} ({Path(str(run.plain['path'])).name})" if repeated[label] > 1 else label
        for label, run in zip(labels, firsts, strict=True)
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
