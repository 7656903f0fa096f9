"""Where a generation's seconds go, measured from outside: the loop holds no clock."""

import functools
import inspect
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from es_cookbook.common.spans import NO_SPANS, Spans

_Watched = TypeVar("_Watched")
LOOP = "loop"
"""What the methods that are watched are called together in a profile."""


class Stopwatch:
    """Seconds of one generation, as a whole and in the methods that are watched.

    `spans` is told of each call; who profiles a run sets another.

    >>> stopwatch = Stopwatch()
    >>> text = stopwatch.watch("some text", "upper")
    >>> stopwatch.start()
    >>> text.upper(), text.title()
    ('SOME TEXT', 'Some Text')
    >>> 0 < stopwatch.seconds["upper"] <= stopwatch.total
    True
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: Spans = NO_SPANS
        self._began = 0.0

    def start(self) -> None:
        """Begin a generation."""
        self.seconds.clear()
        self._began = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the generation began."""
        return time.perf_counter() - self._began

    def watch(self, watched: _Watched, *methods: str) -> _Watched:
        """Returns the same object to all appearances, with some of its methods timed."""
        timed = {name: self._timed(name, getattr(watched, name)) for name in methods}
        return cast(_Watched, _Timed(watched, timed))

    @contextmanager
    def lap(self, name: str) -> Generator[None]:
        """Inside, time counts as that of `name`."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.seconds[name] = ended - began
        self.spans.add(LOOP, name, began, ended)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: object) -> object:
            with self.lap(name):
                return method(*args)

        @functools.wraps(method)
        async def wait(*args: object) -> object:
            with self.lap(name):
                return await method(*args)

        return wait if inspect.iscoroutinefunction(method) else call


class _Timed:
    def __init__(self, watched: object, timed: Mapping[str, Callable[..., Any]]) -> None:
        self._watched = watched
        self._timed = timed

    def __getattr__(self, name: str) -> object:
        return self._timed.get(name) or getattr(self._watched, name)
