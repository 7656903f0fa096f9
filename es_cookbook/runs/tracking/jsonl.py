"""`metrics.jsonl` and `rollouts.jsonl`: what a run measured and what it said.

JSON has no NaN and no infinity: they are null, which `read_metrics` reads as NaN. Every line is
fsynced, so that a generation in the history always has its metrics.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import HistoryError
from es_cookbook.common.files import ANY_SIZE, lines, opened, parsed
from es_cookbook.common.terminal import plural
from es_cookbook.rl.rollouts import REPORTED
from es_cookbook.rl.types import Logs, LostRollout, TrajectoryGroup
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
"""Held-out, what most tasks are about: the share of answers that are right."""
REWARD = "test/reward/mean"
MEASURES = (CORRECT, REWARD, "reward/mean")
"""What runs are told apart by: the first of them that was measured."""
PASS_AT = "test/pass@"
"""What the keys of held-out pass@k begin with; k follows."""
_LARGEST = 1e300
"""Largest number in a file, so that sums are finite; Python's integers are unbounded."""


@chz.chz
class JsonlTrackerBuilder(TrackerBuilder):
    """Builds the tracker that writes `metrics.jsonl` and `rollouts.jsonl`."""

    rollouts_per_generation: int = chz.field(
        default=4, doc="rollouts kept in full each generation, chosen at random"
    )
    max_text_chars: int = chz.field(
        default=20_000, doc="longer prompts, actions and logs are cut in rollouts.jsonl, and say so"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "rollouts_per_generation", at_least=0)
        check_range(self, "max_text_chars", at_least=1)

    def __call__(self, run: RunInfo) -> Tracker:
        return _JsonlTracker(self, run)


class _JsonlTracker(Tracker):
    def __init__(self, builder: JsonlTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        self._run = run
        self._metrics = LineFile(run.path / "metrics.jsonl")
        self._rollouts = LineFile(run.path / "rollouts.jsonl")

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
        limit = self._builder.max_text_chars
        if len(text) <= limit:
            return text
        return f"{text[:limit]} [{len(text) - limit} more characters]"

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()


def reported_key(key: str) -> str:
    """The key of how many answers a mean is over; rows have it if that is not all of them.

    >>> reported_key("env/all/correct"), reported_key("test/reward/mean")
    ('reported/env/all/correct', 'test/reported/reward/mean')
    """
    head = "test/" if key.startswith("test/") else ""
    return f"{head}{REPORTED}{key.removeprefix(head)}"


def reported(metrics: Mapping[str, float], key: str) -> str:
    """How many answers a mean is over, if that is not all of them.

    >>> reported({"env/all/correct": 0.9, "reported/env/all/correct": 29.0}, "env/all/correct")
    'of 29 answers'
    """
    count = metrics.get(reported_key(key), math.nan)
    return "" if math.isnan(count) else f"of {plural(round(count), 'answer')}"


def _line(value: object) -> bytes:
    return json.dumps(finite(value), allow_nan=False).encode() + b"\n"


def finite(value: object) -> object:
    """The value with every number that JSON cannot write replaced by None."""
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        return {key: finite(entry) for key, entry in entries.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("Sequence[object]", value)]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(cast(float, value))  # Also NumPy's floats.
    return number if abs(number) <= _LARGEST else None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every whole line of a `metrics.jsonl`, null as NaN; a torn last line is left out.

    Returns:
        One dict a generation, in order; none where there is no file.

    Raises:
        HistoryError: A line is no such dict, or the file cannot be read; names it.
    """
    try:
        with opened(path, ANY_SIZE, path.parent) as file:
            return [
                metrics_of_line(line[:-1], f"{path}, line {number}")
                for number, line in enumerate(lines(file), start=1)
                if line.endswith(b"\n")
            ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HistoryError(f"{path} cannot be read: {error.strerror or error}") from error


def metrics_of_line(line: bytes, where: str) -> dict[str, float]:
    """The metrics of one line, null as NaN; `where` is named where it is damaged.

    Raises:
        HistoryError: It is no dict of numbers.
    """
    try:
        found = parsed(line)
    except ValueError as error:
        raise HistoryError(f"{where} is damaged: it must be a line of JSON ({error})") from error
    if not isinstance(found, dict):
        raise HistoryError(f"{where} is damaged: it must be a dict, found {found!r:.60}")
    row: dict[str, float] = {}
    for key, value in cast("dict[str, float | None]", found).items():
        if value is None:
            row[key] = math.nan
        elif type(value) in (int, float) and abs(value) <= _LARGEST:
            row[key] = value if abs(value) < 2**63 else float(value)  # NumPy has no larger integer.
        else:
            raise HistoryError(
                f"{where} is damaged: {key!r:.60} must be a number or null, found {value!r:.60}"
            )
    return row
