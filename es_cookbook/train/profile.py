"""A profile of a run: a trace of who did what and when, and where a generation's seconds went.

    es-cookbook countdown profile=true

`profile.json` in the run directory is in Chrome's trace event format, which ui.perfetto.dev and
chrome://tracing open. It has a row for the loop, for each engine and each lane of the torch engine,
and for the Envs (the time in which at least one of them had control); engines and lanes are `idle`
where they do nothing else. A process profiles its first generations alone, and of each of them so
many spans at most, so the file stays small. A run that is resumed adds a process to the file.

Engines in processes of their own (Ray, vLLM) have one row each: their lanes are not watched.
"""

import dataclasses
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
from es_cookbook.runs.tracking.base import Decode, Tracker
from es_cookbook.train.recorder import LOOP

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


class Span(NamedTuple):
    """What was done, and when, by `time.perf_counter`."""

    name: str
    began: float
    ended: float

    def within(self, began: float, ended: float) -> float:
        """Seconds of it between two moments."""
        return max(min(self.ended, ended) - max(self.began, began), 0.0)


class Profile(Tracker):
    """Takes the spans of a run and writes them once a generation, until there are enough.

    Args:
        path: where to; what an earlier process of the run has written there is kept.

    Attributes:
        spans: takes what they do who are given it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spans = _Collected()
        self._events = _earlier(path)
        self._process = 1 + max((cast(int, event["pid"]) for event in self._events), default=0)
        self._origin = time.perf_counter()
        self._threads: dict[str, int] = {}
        self._told_until: dict[str, float] = {}
        self._ended: float | None = None
        self._total = 0.0
        self._table = Table()

    @override
    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        """The generation has just ended."""
        self._ended = time.perf_counter()

    @override
    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._total = metrics.get("time/total", 0.0)

    @override
    def recorded(self, generations: int) -> None:
        """Write what the generation's spans were."""
        if self._ended is None or self.spans.is_over:
            return
        began, ended, self._ended = self._ended - self._total, self._ended, None
        if not self._events:
            self._tell_process(generations - 1)
        self._tell(_GENERATIONS, Span(f"generation {generations - 1}", began, ended))
        found = self.spans.taken(ended)
        for track in dict.fromkeys((*self._told_until, *found)):
            if track != _GENERATIONS:
                self._tell_track(track, found.get(track, []), began, ended)
        self._table.generations += 1
        self._table.seconds += ended - began
        self.spans.is_over = self._table.generations >= MOST_GENERATIONS
        self._write()

    @override
    def close(self) -> None:
        """Print the table, once."""
        table, self._table = self._table, Table()
        if table.generations:
            print("\n".join((*table.lines(), f"written to {self._path}")), flush=True)

    def _tell_track(self, track: str, spans: Iterable[Span], began: float, ended: float) -> None:
        """The spans of a track, with idle ones between them if it is an engine's."""
        until = self._told_until.get(track, self._origin)
        last = max(until, ended)
        for span in sorted(spans, key=lambda each: each.began):
            if track.startswith("engine") and span.began - until > _GAP:
                self._tell(track, Span(_IDLE, until, span.began), began, ended)
            # One that a thread told of late may begin before what counts as told.
            self._tell(track, span._replace(began=max(span.began, until)), began, ended)
            until = max(until, span.ended)
        if track.startswith("engine") and last - until > _GAP:
            self._tell(track, Span(_IDLE, until, last), began, ended)
            until = last
        self._told_until[track] = until

    def _tell(self, track: str, span: Span, began: float = 0.0, ended: float = 0.0) -> None:
        if span.ended <= span.began:
            return
        self._table.add(track, span.name, span.within(began, ended))
        if track not in self._threads:
            self._threads[track] = len(self._threads)
            about = {"name": "thread_name", "ph": "M", "args": {"name": track}}
            order = {"name": "thread_sort_index", "ph": "M", "args": {"sort_index": _place(track)}}
            self._events += [self._event(track, about), self._event(track, order)]
        took = {
            "name": span.name,
            "ph": "X",
            "ts": _microseconds(span.began - self._origin),
            "dur": _microseconds(span.ended - span.began),
        }
        self._events.append(self._event(track, took))

    def _tell_process(self, generation: int) -> None:
        name = {"name": f"process {self._process} of the run, from generation {generation}"}
        self._events.append({"name": "process_name", "ph": "M", "pid": self._process, "args": name})

    def _event(self, track: str, event: Mapping[str, object]) -> dict[str, object]:
        return {**event, "pid": self._process, "tid": self._threads[track]}

    def _write(self) -> None:
        lines = ",\n".join(json.dumps(event) for event in self._events)
        more = {"spans left out": self.spans.num_left_out}
        end = f'\n],\n"displayTimeUnit": "ms",\n"otherData": {json.dumps(more)}}}\n'
        replace_file(self._path, [b'{"traceEvents": [\n', lines.encode(), end.encode()])


class _Collected(Spans):
    """Spans of the generation that is going on.

    Attributes:
        is_over: none is taken any more.
        num_left_out: because there were too many.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.num_left_out = 0
        self._by_track: dict[str, list[Span]] = {}
        self._room = _MOST_SPANS
        self._under_way: dict[object, tuple[str, Span]] = {}

    @override
    @contextmanager
    def span(self, track: str, name: str) -> Generator[None]:
        """One that does not end within its generation counts in each for its part."""
        began = time.perf_counter()
        own = object()
        self._under_way[own] = track, Span(name, began, began)
        try:
            yield
        finally:
            _, span = self._under_way.pop(own)
            self.add(track, name, span.began, time.perf_counter())

    @override
    def add(self, track: str, name: str, began: float, ended: float) -> None:
        if self.is_over:
            return
        spans = self._by_track.setdefault(track, [])
        if spans and spans[-1].name == name and began - spans[-1].ended < _GAP:
            spans[-1] = Span(name, spans[-1].began, ended)
        elif self._room > 0:
            self._room -= 1
            spans.append(Span(name, began, ended))
        else:
            self.num_left_out += 1

    def taken(self, until: float) -> dict[str, list[Span]]:
        """All of them until then, by track; a new generation begins."""
        for own, (track, span) in self._under_way.items():
            self.add(track, span.name, span.began, until)
            self._under_way[own] = track, span._replace(began=until)
        spans, self._by_track, self._room = self._by_track, {}, _MOST_SPANS
        return spans


@dataclasses.dataclass(slots=True)
class Table:
    """Seconds by track and by what was done, over some generations."""

    generations: int = 0
    seconds: float = 0.0
    by_track: dict[str, dict[str, float]] = dataclasses.field(
        default_factory=lambda: defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    )

    def add(self, track: str, name: str, seconds: float) -> None:
        """So many seconds more of a generation."""
        if seconds and track != _GENERATIONS:
            self.by_track[track][name] += seconds

    def lines(self) -> Iterator[str]:
        """A line for what the loop, engines, lanes (the mean over them) and Envs did."""
        per_generation = self.seconds / self.generations
        count = plural(self.generations, "generation")
        yield f"where {per_generation:.3g} s of a generation went (mean of {count}):"
        rest = self.seconds - sum(self.by_track[LOOP].values())
        self.add(LOOP, _OTHER, max(rest, 0.0))
        groups: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for track in sorted(self.by_track, key=_place):
            groups[re.sub(r" \d+", "", track)].append(self.by_track[track])
        for title, tracks in groups.items():
            shown = title if len(tracks) == 1 else f"{title} (mean of {len(tracks)})"
            for name in sorted({name for track in tracks for name in track}, key=_ORDER.index):
                seconds = sum(track.get(name, 0.0) for track in tracks) / len(tracks)
                share = seconds / self.seconds if self.seconds else 0.0
                yield f"  {shown:<32}{name:<10}{seconds / self.generations:>9.4f} s {share:>7.1%}"
                shown = ""


def _place(track: str) -> int:
    """Order of a track: the generations, the loop, engines each before its lanes, Envs."""
    first = {_GENERATIONS: 0, LOOP: 1, "environments": 10**9}
    if track in first:
        return first[track]
    numbers = dict(re.findall(r"(engine|lane) (\d+)", track))
    return 2 + 1000 * int(numbers.get("engine", 0)) + int(numbers.get("lane", -1)) + 1


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _earlier(path: Path) -> list[dict[str, object]]:
    """The events of a profile that is there; none of a file that is no profile of ours."""
    try:
        found = parsed(read_file(path, _LARGEST, path.parent), _LARGEST)
        events = cast("Mapping[str, list[dict[str, object]]]", found)["traceEvents"]
        return events if all(type(event["pid"]) is int for event in events) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
