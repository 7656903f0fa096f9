"""What a run brought, from its `metrics.jsonl`: first and last held-out metrics, and the time."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from es_cookbook.common.terminal import plural
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.tracking.jsonl import (
    CORRECT,
    MEASURES,
    PASS_AT,
    read_metrics,
    reported,
    reported_key,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run brought so far.

    Attributes:
        path: the run directory.
        first: held-out metrics (`test/...`) and `reward/mean`, as each was measured first.
        last: the same, as each was measured last.
    """

    path: Path
    first: Mapping[str, float]
    last: Mapping[str, float]

    def gain(self, key: str = CORRECT) -> str:
        """A metric's first and last value in words, and pass@k of the largest k if measured.

        Shares (keys under `test/env/` and `test/pass@`) are compared in points. If the metric was
        not measured, `test/reward/mean` or `reward/mean` takes its place. A mean that is not over
        all answers says how many.

        >>> found = Result(Path("run"), {"test/env/all/correct": 0.25}, {"test/env/all/correct": 1})
        >>> found.gain()
        'test/env/all/correct 0.250 -> 1.000 (+75.0 points)'
        """
        main = [name for name in (key, *MEASURES[1:]) if name in self.last][:1]
        if not main:
            return "nothing was measured"
        ks = [int(k) for name in self.last if (k := name.removeprefix(PASS_AT)).isdecimal()]
        told = main + [f"{PASS_AT}{k}" for k in sorted(ks)[-1:]]
        return ", ".join(self._told(each) for each in told)

    def _told(self, key: str) -> str:
        ends = (self.first, self.last)
        first, last = (values[key] for values in ends)
        shown = [f"{values[key]:.3f}" + _over(values, key) for values in ends]
        may_be_share = "env/" in key or key.startswith(PASS_AT)
        is_share = may_be_share and all(0 <= value <= 1 for value in (first, last))
        gain = f"{100 * (last - first):+.1f} points" if is_share else f"{last - first:+.3f}"
        return f"{key} {' -> '.join(shown)} ({gain})"


def result_of(log_path: Path, rows: Sequence[Mapping[str, float]] | None = None) -> Result:
    """The result of the run in a directory so far, from the rows of its metrics if they are given.

    Raises:
        HistoryError: Its metrics are damaged.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for row in read_metrics(log_path / METRICS) if rows is None else rows:
        told = {k: v for k, v in row.items() if k.startswith("test/") or k == "reward/mean"}
        complete = {reported_key(key) for key in told} - told.keys()
        new = {
            k: v for k, v in told.items() if k.replace(reported_key("test/"), "test/") not in first
        }
        first |= new
        last = {key: value for key, value in (last | told).items() if key not in complete}
    return Result(log_path, first, last)


def elapsed(seconds: float, rows: Sequence[Mapping[str, float]], since: float) -> str:
    """The wall time of a process that ran a run, and the part of it spent in generations.

    Args:
        seconds: all of them: start, loading, evaluations and generations.
        rows: of `metrics.jsonl`.
        since: when it began, as `time/unix` in rows; earlier ones are another process's.
    """
    own = [row["time/total"] for row in rows if row.get("time/unix", -math.inf) >= since]
    took = duration_in_words(seconds)
    if not own:
        return f"{took} (no generation was left to run)"
    return f"{took} ({plural(len(own), 'generation')}: {duration_in_words(math.fsum(own))})"


def _over(values: Mapping[str, float], key: str) -> str:
    over = reported(values, key)
    return f" ({over})" if over else ""


def duration_in_words(seconds: float) -> str:
    """How long something took.

    >>> duration_in_words(12), duration_in_words(90), duration_in_words(7200)
    ('12 s', '1.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
