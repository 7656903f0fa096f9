"""A profile of a run: a trace of who did what and when, and where a generation's seconds went.

    es-cookbook countdown profile=true

`profile.json` in the run directory is in Chrome's trace event format, which ui.perfetto.dev and
chrome://tracing open. It has a row for the loop, for each engine and each lane of the torch engine,
and for the Envs (the time in which at least one of them had control); engines and lanes are `idle`
where they do nothing else. A process profiles its first generations alone, and of each of them so
many spans at most, so the file stays small. A run that is resumed adds a process to the file.

Engines in processes of their own (Ray, vLLM) have one row each: their lanes are not watched.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

from typing_extensions import override

from es_cookbook.common.files import parsed, read_file
from es_cookbook.common.spans import Spans
from es_cookbook.common.terminal import plural
from es_cookbook.rl.types import TrajectoryGroup
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.recorder import LOOP
from es_cookbook.runs.tracking.base import Decode, Tracker

MOST_GENERATIONS = 20
"""Generations of one process that are profiled."""
_MOST_SPANS = 10_000
"""Of one generation; further ones are counted."""
_GAP = 1e-4
"""Seconds between spans of one name that count as one."""
_LARGEST = 64 * 2**20
"""Bytes of an earlier process's profile that is kept."""
_IDLE = "idle"
_GENERATIONS = "generations"
_OTHER = "other"
_ORDER = (
    *("rollout_centre", "ask", "load", "rollout", "sample", "score", "tell", "apply"),
    *("record", "evaluate", _OTHER, _IDLE),
)
"""What is done, in the order in which the table has it."""


class _Span(NamedTuple):
    """What was done, and when, by `time.perf_counter`."""

    name: str
    began: float
    ended: float

    def within(self, began: float, ended: float) -> float:
        """Seconds of it between two moments."""
        return max(min(self.ended, ended) - max(self.began, began), 0.0)


class Profile(Tracker, Spans):
    """Takes the spans of a run and writes them once a generation, until there are enough.

    Args:
        path: where to; what an earlier process of the run has written there is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events = _earlier(path)
        self._process = 1 + max((cast(int, event["pid"]) for event in self._events), default=0)
        self._origin = time.perf_counter()
        self._threads: dict[str, int] = {}
        self._written_until: dict[str, float] = {}
        self._num_left_out = 0
        # Of the generation that is going on.
        self._room = _MOST_SPANS
        self._spans: dict[str, list[_Span]] = defaultdict(list)
        self._under_way: dict[object, tuple[str, _Span]] = {}
        self._total = 0.0
        self._ended: float | None = None
        # Of the table: seconds by track and by what was done.
        self._generations = 0
        self._seconds = 0.0
        self._by_track: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    @property
    def _is_over(self) -> bool:
        return self._generations >= MOST_GENERATIONS

    @override
    @contextmanager
    def span(self, track: str, name: str) -> Generator[None]:
        """One that does not end within its generation counts in each for its part."""
        began = time.perf_counter()
        own = object()
        self._under_way[own] = track, _Span(name, began, began)
        try:
            yield
        finally:
            _, span = self._under_way.pop(own)
            self.add(track, name, span.began, time.perf_counter())

    @override
    def add(self, track: str, name: str, began: float, ended: float) -> None:
        if self._is_over:
            return
        spans = self._spans[track]
        if spans and spans[-1].name == name and began - spans[-1].ended < _GAP:
            spans[-1] = _Span(name, spans[-1].began, ended)
        elif self._room > 0:
            self._room -= 1
            spans.append(_Span(name, began, ended))
        else:
            self._num_left_out += 1

    @override
    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        self._ended = time.perf_counter()

    @override
    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._total = metrics.get("time/total", 0.0)

    @override
    def recorded(self, generations: int) -> None:
        """Write what the generation's spans were."""
        if self._ended is None or self._is_over:
            return
        began, ended, self._ended = self._ended - self._total, self._ended, None
        if not self._events:
            name = f"process {self._process} of the run, from generation {generations - 1}"
            self._events.append(_about("process_name", {"name": name}, self._process))
        self._write_span(_GENERATIONS, _Span(f"generation {generations - 1}", began, ended))
        for own, (track, span) in self._under_way.items():
            self.add(track, span.name, span.began, ended)
            self._under_way[own] = track, span._replace(began=ended)
        found, self._spans, self._room = self._spans, defaultdict(list), _MOST_SPANS
        for track in dict.fromkeys((*self._written_until, *found)):
            for span in self._with_idle(track, found.get(track, []), ended):
                self._write_span(track, span)
                self._by_track[track][span.name] += span.within(began, ended)
        self._generations += 1
        self._seconds += ended - began
        lines = ",\n".join(json.dumps(event) for event in self._events)
        more = {"spans left out": self._num_left_out}
        end = f'\n],\n"displayTimeUnit": "ms",\n"otherData": {json.dumps(more)}}}\n'
        replace_file(self._path, [b'{"traceEvents": [\n', lines.encode(), end.encode()])

    @override
    def close(self) -> None:
        if self._by_track:
            print("\n".join((*self._table(), f"written to {self._path}")), flush=True)
            self._by_track.clear()

    def _with_idle(self, track: str, spans: Iterable[_Span], ended: float) -> Iterator[_Span]:
        """The spans of a track, with idle ones between them if it is an engine's."""
        until = self._written_until.get(track, self._origin)
        last = max(until, ended)
        end = [_Span("", last, last)] if track.startswith("engine") else []
        for span in (*sorted(spans, key=lambda each: each.began), *end):
            if end and span.began - until > _GAP:
                yield _Span(_IDLE, until, span.began)
                until = span.began
            # One that a thread told of late may begin before what was written.
            if span.ended > max(span.began, until):
                yield span._replace(began=max(span.began, until))
            until = max(until, span.ended)
        self._written_until[track] = until

    def _write_span(self, track: str, span: _Span) -> None:
        if track not in self._threads:
            self._threads[track] = len(self._threads)
            order = {"sort_index": _place(track)}
            for name, about in (("thread_name", {"name": track}), ("thread_sort_index", order)):
                event = _about(name, about, self._process)
                self._events.append({**event, "tid": self._threads[track]})
        self._events.append(
            {
                "name": span.name,
                "ph": "X",
                "ts": round((span.began - self._origin) * 1e6, 1),
                "dur": round((span.ended - span.began) * 1e6, 1),
                "pid": self._process,
                "tid": self._threads[track],
            }
        )

    def _table(self) -> Iterator[str]:
        """A line for what the loop, engines, lanes (the mean over them) and Envs did."""
        each = self._seconds / self._generations
        count = plural(self._generations, "generation")
        yield f"where {each:.3g} s of a generation went (mean of {count}):"
        self._by_track[LOOP][_OTHER] = max(self._seconds - sum(self._by_track[LOOP].values()), 0.0)
        groups: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for track in sorted(self._by_track, key=_place):
            groups[re.sub(r" \d+", "", track)].append(self._by_track[track])
        for title, tracks in groups.items():
            shown = title if len(tracks) == 1 else f"{title} (mean of {len(tracks)})"
            for name in sorted({name for track in tracks for name in track}, key=_ORDER.index):
                seconds = sum(track.get(name, 0.0) for track in tracks) / len(tracks)
                if not seconds:
                    continue
                share = seconds / self._seconds
                yield f"  {shown:<32}{name:<10}{seconds / self._generations:>9.4f} s {share:>7.1%}"
                shown = ""


def _about(name: str, about: Mapping[str, object], process: int) -> dict[str, object]:
    return {"name": name, "ph": "M", "args": about, "pid": process}


def _place(track: str) -> int:
    """Order of a track: the generations, the loop, engines each before its lanes, Envs."""
    first = {_GENERATIONS: 0, LOOP: 1, "environments": 10**9}
    if track in first:
        return first[track]
    numbers = dict(re.findall(r"(engine|lane) (\d+)", track))
    return 2 + 1000 * int(numbers.get("engine", 0)) + int(numbers.get("lane", -1)) + 1


def _earlier(path: Path) -> list[dict[str, object]]:
    """The events of a profile that is there; none of a file that is no profile of ours."""
    try:
        found = parsed(read_file(path, _LARGEST, path.parent), _LARGEST)
        events = cast("Mapping[str, list[dict[str, object]]]", found)["traceEvents"]
        return events if all(type(event["pid"]) is int for event in events) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
