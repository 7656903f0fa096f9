"""Held-out scores of several runs over rollouts and over seconds, and the table beside them.

Seconds are those of training: `time/total` of all generations before a measurement, without the
measurements themselves. At equal seconds, a run has the last score that it had reached by then.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from es_cookbook.commands.gradients.contest import Measured
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.types import Metrics
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.report.plots import Line, draw
from es_cookbook.runs.tracking.jsonl import read_metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Race:
    """Runs that differ in their seed alone: runs x measurements, the first before training."""

    rollouts_M: Sequence[int]
    seconds_R_M: Sequence[Sequence[float]]
    scores_R_M: Sequence[Sequence[float]]

    def at_seconds(self, seconds: float) -> list[float]:
        """The last score of each run that it had reached by then."""
        return [
            [score for t, score in zip(seconds_M, scores_M, strict=True) if t <= seconds][-1]
            for seconds_M, scores_M in zip(self.seconds_R_M, self.scores_R_M, strict=True)
        ]

    @property
    def seconds_R(self) -> list[float]:
        """Of each whole run."""
        return [seconds_M[-1] for seconds_M in self.seconds_R_M]


def race_of(log_paths_R: Sequence[Path], metric: str) -> Race:
    """Read the metrics of runs.

    Raises:
        ConfigError: A run without the metric.
    """
    rollouts_R: list[list[int]] = []
    seconds_R: list[list[float]] = []
    scores_R: list[list[float]] = []
    for log_path in log_paths_R:
        rollouts, seconds = 0, 0.0
        measured: list[tuple[int, float, float]] = []
        for row in read_metrics(log_path / METRICS):
            if metric in row:
                measured.append((rollouts, seconds, row[metric]))
            rollouts = int(row["progress/rollouts"])
            seconds += row.get("time/total", 0.0)
        if not measured:
            raise ConfigError(f"{log_path / METRICS} has no {metric}, so it cannot be compared")
        for of, values in zip(
            (rollouts_R, seconds_R, scores_R), zip(*measured, strict=True), strict=True
        ):
            of.append(list(values))
    return Race(rollouts_R[0], seconds_R, scores_R)


def table(
    races: Mapping[str, Race],
    measured: Mapping[str, Sequence[Measured]],
    base: Metrics,
    attempts: int,
    *,
    second: bool,
) -> str:
    """All contestants, and the base, as a Markdown table."""
    least = min(min(race.seconds_R) for race in races.values())
    head = [
        "",
        "held-out, greedy",
        f"after {least:.0f} s",
        "s of training",
        *(f"pass@{k}, T = 1" for k in (1, attempts)),
        "KL to the base, nats a token",
        *(["second task"] if second else []),
        "peak memory, MiB",
        "kept, kB",
    ]
    first = next(iter(races.values()))
    finals = [f"test/pass@{k}" for k in (1, attempts)]
    rows = [
        [
            "base",
            _percent([first.scores_R_M[0][0]]),
            "",
            "",
            *(_percent([base.get(key, math.nan)]) for key in finals),
            "0",
            *([_percent([_second(base)])] if second else []),
            "",
            "",
        ]
    ]
    for name, race in races.items():
        of = measured[name]
        rows.append(
            [
                name,
                _percent([scores_M[-1] for scores_M in race.scores_R_M]),
                _percent(race.at_seconds(least)),
                f"{fmean(race.seconds_R):.0f}",
                *(_percent([each.final.get(key, math.nan) for each in of]) for key in finals),
                f"{fmean(each.final['test/env/kl/kl'] for each in of):.3f}",
                *([_percent([_second(each.final) for each in of])] if second else []),
                f"{fmean(each.peak_bytes for each in of) / 2**20:.0f}",
                f"{fmean(each.kept_bytes for each in of) / 1000:.0f}",
            ]
        )
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _second(metrics: Metrics) -> float:
    for name in ("correct", "solved"):
        if (key := f"second/test/env/all/{name}") in metrics:
            return metrics[key]
    return metrics["second/test/reward/mean"]


def _percent(values_R: Sequence[float]) -> str:
    mean, low, high = fmean(values_R), min(values_R), max(values_R)
    if math.isnan(mean):
        return "–"
    spread = f" ({100 * low:.1f} … {100 * high:.1f})" if len(values_R) > 1 else ""
    return f"{100 * mean:.1f} %{spread}"


def draw_races(path: Path, races: Mapping[str, Race], metric: str, recipe: str) -> None:
    """Two plots beside `path`: over rollouts, and over seconds, the mean of the seeds' seconds."""
    num_seeds = max(len(race.scores_R_M) for race in races.values())
    seeds = f"mean and range of {num_seeds} seeds" if num_seeds > 1 else "one seed"
    y_label = f"{metric.removeprefix('test/env/all/')}, held-out (%)"
    scores = {
        name: [[100 * score for score in scores_M] for scores_M in race.scores_R_M]
        for name, race in races.items()
    }
    by = {
        "rollouts": {name: race.rollouts_M for name, race in races.items()},
        "seconds": {
            name: [fmean(at_M) for at_M in zip(*race.seconds_R_M, strict=True)]
            for name, race in races.items()
        },
    }
    for what, x_of in by.items():
        draw(
            path.with_name(f"{path.name}-{what}"),
            {name: Line(x_of[name], scores[name]) for name in races},
            title=f"{recipe.replace('_', ' ').capitalize()}, {seeds}",
            x_label=f"training {what}",
            y_label=y_label,
        )
