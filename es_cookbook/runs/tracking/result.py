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
    reported_key,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run brought so far.

    Attributes:
        path: the run directory.
        first: held-out metrics (`test/...`) and `reward/mean`, as each was measured first.
        last: the same, as each was measured last.

    Beside a mean that is not over all answers stands over how many (`reported_key`).
    """

    path: Path
    first: Mapping[str, float]
    last: Mapping[str, float]

    def gain(self, key: str = CORRECT) -> str:
        """A metric's first and last value in words.

        Shares (keys under `test/env/` and `test/pass@`) are compared in points. Where the metric
        was not measured, the first that was of `test/reward/mean` and `reward/mean` takes its
        place. pass@k is told too where it was measured, of the largest k. A mean that is not over
        all answers says over how many it is.

        >>> found = Result(Path("run"), {"test/env/all/correct": 0.25}, {"test/env/all/correct": 1})
        >>> found.gain()
        'test/env/all/correct 0.250 -> 1.000 (+75.0 points)'
        """
        main = [name for name in (key, *MEASURES[1:]) if name in self.last][:1]
        if not main:
            return "nothing was measured"
        ks = [int(k) for name in self.last if (k := name.removeprefix(PASS_AT)).isdecimal()]
        told = main + [f"{PASS_AT}{k}" for k in sorted(ks)[-1:]]
        return ", ".join(map(self._gain, told))

    def _gain(self, key: str) -> str:
        gain = _gain(key, self.first[key], self.last[key])
        ends = {"first": self.first, "last": self.last}
        counts = {when: values.get(reported_key(key)) for when, values in ends.items()}
        if len(few := set(counts.values())) == 1:
            (count,) = few
            return gain if count is None else f"{gain}, of {plural(round(count), 'answer')}"
        told = " and ".join(f"{n:.0f} the {when}" for when, n in counts.items() if n is not None)
        return f"{gain}; over {told} time, fewer than all answers"


def result_of(log_path: Path) -> Result:
    """The result of the run in a directory, as far as it is.

    Raises:
        HistoryError: Its metrics are damaged.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for row in read_metrics(log_path / METRICS):
        told = {k: v for k, v in row.items() if k.startswith("test/") or k == "reward/mean"}
        for key in told.keys() - set(map(reported_key, told)):
            few = reported_key(key)
            counts = {few: told[few]} if few in told else {}
            if key not in first:
                first |= {key: told[key], **counts}
            last.pop(few, None)
            last |= {key: told[key], **counts}
    return Result(log_path, first, last)


def elapsed(seconds: float, rows: Sequence[Mapping[str, float]], since: float) -> str:
    """The wall time of a process that ran a run, and how much of that its generations did.

    Args:
        seconds: all of them: start, loading, evaluations and generations.
        rows: of `metrics.jsonl`.
        since: when it began, as `time/unix` in rows; those from before are another process's.
    """
    own = [row for row in rows if "time/total" in row and row.get("time/unix", 0.0) >= since]
    took = duration_in_words(seconds)
    if not own:
        return f"{took} (no generation was left to run)"
    last = sum("time/total" in row for row in rows)
    if len(own) == last:
        which = plural(last, "generation")
    else:
        first = last - len(own) + 1
        which = f"generation {last}" if first == last else f"generations {first} to {last}"
    generations = math.fsum(row["time/total"] for row in own)
    return f"{took} ({which}: {duration_in_words(generations)})"


def _gain(key: str, first: float, last: float) -> str:
    may_be_share = "env/" in key or key.startswith(PASS_AT)
    is_share = may_be_share and all(0 <= value <= 1 for value in (first, last))
    gain = f"{100 * (last - first):+.1f} points" if is_share else f"{last - first:+.3f}"
    return f"{key} {first:.3f} -> {last:.3f} ({gain})"


def duration_in_words(seconds: float) -> str:
    """How long something took.

    >>> duration_in_words(12), duration_in_words(90), duration_in_words(7200)
    ('12 s', '1.5 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
