"""Spans of time: who did what, from when to when. A profile is made of them.

Whoever does something worth a span has a `Spans` and tells it. That of a run which is not profiled
is `NO_SPANS`, which keeps nothing, so nobody asks whether there is a profile.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager


class Spans:
    """Takes spans, and keeps none; times are of `time.perf_counter`.

    Safe to call from many threads, where each has a track of its own.
    """

    def add(self, track: str, name: str, began: float, ended: float) -> None:
        """`track` (an engine, a lane) did `name` all the time."""

    @contextmanager
    def span(self, track: str, name: str) -> Generator[None]:
        """Inside, `track` does `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(track, name, began, time.perf_counter())


NO_SPANS = Spans()
