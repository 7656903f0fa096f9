"""A profile of a run: a trace of its spans of time.

    es-cookbook countdown profile=true

When the run ends, `profile.json` in the run directory gets a trace in Chrome's event format, which
ui.perfetto.dev and chrome://tracing open. It has a row for the loop, for each engine and each lane
of the torch engine, and for the Envs (the time in which at least one of them had control). For a
long run it has the first spans only. Engines in separate processes (Ray, vLLM) have one row
each: their lanes are not watched.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from es_cookbook.common.machine.spans import Spans
from es_cookbook.runs.files import replace_file

MOST_SPANS = 100_000
_GAP = 1e-4
"""Seconds between spans of one name that count as one."""


class _Span(NamedTuple):
    """A span of time, by `time.perf_counter`."""

    name: str
    began: float
    ended: float


class Profile(Spans):
    """Collects the spans of a run, and writes them at its end.

    Args:
        path: path of the trace.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.perf_counter()
        self._spans: dict[str, list[_Span]] = defaultdict(list)
        self._num_spans = 0

    @override
    def add(self, track: str, name: str, began: float, ended: float) -> None:
        spans = self._spans[track]
        if spans and spans[-1].name == name and began - spans[-1].ended < _GAP:
            spans[-1] = _Span(name, spans[-1].began, ended)
        elif self._num_spans < MOST_SPANS:
            self._num_spans += 1
            spans.append(_Span(name, began, ended))

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        """Write the trace, however the run ended."""
        lines = ",\n".join(map(json.dumps, self._events()))
        end = '\n],\n"displayTimeUnit": "ms"}\n'
        replace_file(self._path, [b'{"traceEvents": [\n', lines.encode(), end.encode()])
        print(f"the profile is in {self._path}", flush=True)

    def _events(self) -> Iterator[dict[str, object]]:
        for number, (track, spans) in enumerate(sorted(self._spans.items())):
            where = {"pid": 1, "tid": number}
            yield {"name": "thread_name", "ph": "M", "args": {"name": track}, **where}
            for span in spans:
                began = round((span.began - self._began) * 1e6, 1)
                took = round((span.ended - span.began) * 1e6, 1)
                yield {"name": span.name, "ph": "X", "ts": began, "dur": took, **where}
