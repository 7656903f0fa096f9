"""`metrics.jsonl` and `rollouts.jsonl`: their tracker, their main keys, and the result of a run.

JSON has no NaN and no infinity: they are null, which `read_metrics` reads as NaN. Every line is
fsynced, so that a generation in the history always has its metrics.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import chz

from es_cookbook.common.checks import in_range
from es_cookbook.common.terminal import cut, plural
from es_cookbook.rl.rollouts import REPORTED
from es_cookbook.rl.types import Logs, LostRollout, TrajectoryGroup
from es_cookbook.runs.directory.directory import METRICS, ROLLOUTS, read_metrics
from es_cookbook.runs.files import LineFile
from es_cookbook.runs.tracking.base import (
    GENERATION,
    Decode,
    RunInfo,
    SampledRollout,
    Tracker,
    TrackerBuilder,
    choose_rollouts,
)

CORRECT = "test/env/all/correct"
"""Held-out share of right answers, the main metric of most tasks."""
REWARD = "test/reward/mean"
MEASURES = (CORRECT, REWARD, "reward/mean")
"""Main metrics in order; the first that was measured summarises a run."""
PASS_AT = "test/pass@"
"""Prefix of the keys of held-out pass@k; k follows."""
_LARGEST = 1e300
"""Largest number that is written."""


@chz.chz
class JsonlTrackerBuilder(TrackerBuilder):
    """Builds the tracker that writes `metrics.jsonl` and `rollouts.jsonl`."""

    rollouts_per_generation: int = chz.field(default=4, doc="rollouts kept in full, at random")
    max_text_chars: int = chz.field(
        default=20_000, doc="longer prompts, actions and logs are cut in rollouts.jsonl, and say so"
    )

    _rollouts_per_generation = in_range("rollouts_per_generation", at_least=0)
    _max_text_chars = in_range("max_text_chars", at_least=1)

    def __call__(self, run: RunInfo) -> Tracker:
        return _JsonlTracker(self, run)


class _JsonlTracker(Tracker):
    def __init__(self, builder: JsonlTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        self._run = run
        self._metrics = LineFile(run.path / METRICS)
        self._rollouts = LineFile(run.path / ROLLOUTS)

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._metrics.append(_line({GENERATION: generation, **metrics}))

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        count = self._builder.rollouts_per_generation
        for sampled in choose_rollouts(self._run.run_seed, generation, groups_P, count):
            self._rollouts.append(_line({"generation": generation, **self._plain(sampled, decode)}))

    def _plain(self, sampled: SampledRollout, decode: Decode) -> dict[str, object]:
        which: dict[str, object] = {
            "problem": sampled.problem,
            "genome": sampled.genome,
            "attempt": sampled.attempt,
            "tags": list(sampled.tags),
            "reward": sampled.reward,
        }
        if sampled.logs:
            which["group_logs"] = self._cut_all(sampled.logs)
        rollout = sampled.rollout
        if isinstance(rollout, LostRollout):
            return which | {"lost": self._cut(rollout.reason)}
        turns = [
            {
                kind: self._cut(decode(new_T)),
                "action": self._cut(transition.action.text),
                "stop_reason": transition.action.stop_reason,
                "reward": transition.reward,
                "metrics": dict(transition.metrics),
                "logs": self._cut_all(transition.logs),
            }
            for transition, (kind, new_T) in zip(rollout.transitions, rollout.seen, strict=True)
        ]
        return which | {"turns": turns}

    def _cut_all(self, logs: Logs) -> dict[str, str]:
        return {name: self._cut(text) for name, text in logs.items()}

    def _cut(self, text: str) -> str:
        return cut(text, self._builder.max_text_chars)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()


def reported_key(key: str) -> str:
    """Return the key that counts the answers in a mean.

    Rows have it if some answers lack the metric.

    >>> reported_key("env/all/correct"), reported_key("test/reward/mean")
    ('reported/env/all/correct', 'test/reported/reward/mean')
    """
    head = "test/" if key.startswith("test/") else ""
    return f"{head}{REPORTED}{key.removeprefix(head)}"


def reported(metrics: Mapping[str, float], key: str) -> str:
    """Return the number of answers in a mean, in words; "" if it includes all of them.

    >>> reported({"env/all/correct": 0.9, "reported/env/all/correct": 29.0}, "env/all/correct")
    'of 29 answers'
    """
    count = metrics.get(reported_key(key), math.nan)
    return "" if math.isnan(count) else f"of {plural(round(count), 'answer')}"


def _line(value: object) -> bytes:
    return json.dumps(finite(value), allow_nan=False).encode() + b"\n"


def finite(value: object) -> object:
    """Return the value with None in place of every number that JSON cannot write."""
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        return {key: finite(entry) for key, entry in entries.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("Sequence[object]", value)]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(cast(float, value))  # Also NumPy's floats.
    return number if abs(number) <= _LARGEST else None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Result of a run.

    Attributes:
        path: the run directory.
        first: the first value of each held-out metric (`test/...`) and of `reward/mean`.
        last: their last values.
    """

    path: Path
    first: Mapping[str, float]
    last: Mapping[str, float]

    def gain(self, key: str = CORRECT) -> str:
        """Describe a metric's first and last value, and pass@k of the largest k if measured.

        Shares (keys under `test/env/` and `test/pass@`) are compared in points. If the metric was
        not measured, `test/reward/mean` or `reward/mean` takes its place.

        >>> found = Result(Path("run"), {"test/env/all/correct": 0.25}, {"test/env/all/correct": 1})
        >>> found.gain()
        'test/env/all/correct 0.250 -> 1.000 (+75.0 points)'
        """
        main = [name for name in (key, *MEASURES[1:]) if name in self.last][:1]
        if not main:
            return "nothing was measured"
        ks = [int(k) for name in self.last if (k := name.removeprefix(PASS_AT)).isdecimal()]
        return ", ".join(map(self._change, main + [f"{PASS_AT}{k}" for k in sorted(ks)[-1:]]))

    def _change(self, key: str) -> str:
        first, last = self.first[key], self.last[key]
        counts = [
            f" ({over})" if (over := reported(row, key)) else "" for row in (self.first, self.last)
        ]
        may_be_share = "env/" in key or key.startswith(PASS_AT)
        is_share = may_be_share and all(0 <= value <= 1 for value in (first, last))
        gain = f"{100 * (last - first):+.1f} points" if is_share else f"{last - first:+.3f}"
        return f"{key} {first:.3f}{counts[0]} -> {last:.3f}{counts[1]} ({gain})"


def result_of(log_path: Path, rows: Sequence[Mapping[str, float]] | None = None) -> Result:
    """Return the result so far of the run in a directory; `rows` are its metrics, read if None.

    Raises:
        HistoryError: Its metrics are damaged.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for row in read_metrics(log_path / METRICS) if rows is None else rows:
        found = {k: v for k, v in row.items() if k.startswith("test/") or k == "reward/mean"}
        complete = {reported_key(key) for key in found} - found.keys()
        new = {
            k: v for k, v in found.items() if k.replace(reported_key("test/"), "test/") not in first
        }
        first |= new
        last = {key: value for key, value in (last | found).items() if key not in complete}
    return Result(log_path, first, last)


def elapsed(seconds: float, rows: Sequence[Mapping[str, float]], since: float) -> str:
    """Describe the wall time of a process that trained, and the share spent in generations.

    Args:
        seconds: total time: start, loading, evaluations and generations.
        rows: rows of `metrics.jsonl`.
        since: start of the process, as `time/unix` in rows; earlier rows are another process's.
    """
    own = [row["time/total"] for row in rows if row.get("time/unix", -math.inf) >= since]
    took = duration_in_words(seconds)
    if not own:
        return f"{took} (no generation was left to run)"
    return f"{took} ({plural(len(own), 'generation')}: {duration_in_words(math.fsum(own))})"


def duration_in_words(seconds: float) -> str:
    """Return a duration as text, in the unit that fits.

    >>> duration_in_words(12), duration_in_words(90), duration_in_words(7200)
    ('12 s', '1.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
