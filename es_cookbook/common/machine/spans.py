"""Time spans for profiles: a track, its activity, start and end.

Engines and samplers report to a `Spans`. In a run without a profile it is `NO_SPANS`, which
discards them, so that callers need no condition.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager


class Spans:
    """Discards spans; times are by `time.perf_counter`.

    Safe to call from several threads if each has its own track.
    """

    def add(self, track: str, name: str, began: float, ended: float) -> None:
        """Record that `track` (an engine, a lane) did `name` from `began` to `ended`."""

    @contextmanager
    def span(self, track: str, name: str) -> Generator[None]:
        """Record the time that is spent inside: `track` does `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(track, name, began, time.perf_counter())


NO_SPANS = Spans()
