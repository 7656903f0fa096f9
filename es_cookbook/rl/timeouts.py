"""Time limits of rollouts, and a warning about Envs that block the event loop.

A rollout waits for the engine most of the time, and how long depends on the population, not on its
Env. So its clock is stopped while it waits, and only an Env that keeps control for too long (a hung
grader, a judge that never answers) is cancelled. One timer checks all clocks periodically, at a
thousandth of the cost of one timer per rollout.

An Env that computes or sleeps without awaiting cannot be cancelled, and while it runs nothing else
does. A thread warns which method blocks the loop. Such code belongs in a worker process, which is
killed at its time-out (`es_cookbook.rl.grading.workers.in_worker`). Clocks stand still while the
loop is blocked, so other rollouts are not lost because of it.
"""

import asyncio
import contextlib
import contextvars
import functools
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator
from types import FrameType, TracebackType

import anyio
from anyio.lowlevel import RunVar

from es_cookbook.common.machine.spans import NO_SPANS, Spans
from es_cookbook.rl.types import Env, EnvGroup, EnvGroupBuilder

WARN_AFTER = 5.0
"""Seconds for which the event loop is blocked before the warning."""
_CHECKS = 8
"""Checks per time-out: an Env is cancelled at most an eighth of it late."""
_LOOKS = 4
"""Looks of the thread per `warn_after`."""
_LONGEST_INTERVAL = 1.0
"""Seconds between two checks, at most."""

_logger = logging.getLogger(__name__)
_limiters: RunVar[dict[tuple[str, int], anyio.CapacityLimiter]] = RunVar("_limiters")
_clock: "contextvars.ContextVar[Clock | None]" = contextvars.ContextVar("clock", default=None)
"""The clock of the rollout whose code runs; the tasks that it starts inherit it."""


@contextlib.contextmanager
def clock_stopped() -> Generator[None]:
    """Inside, the clock of the current rollout, if any, is stopped."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.wait()
    try:
        yield
    finally:
        clock.go_on()


@contextlib.asynccontextmanager
async def in_turn(kind: str, at_once: int) -> AsyncGenerator[None]:
    """Limit concurrency per kind on this event loop; the clock stops while waiting."""
    release = await turn(kind, at_once)
    try:
        yield
    finally:
        release()


async def turn(kind: str, at_once: int) -> Callable[[], None]:
    """Like `in_turn`, for work that outlives the caller; returns the function that ends it."""
    limiters = _limiters.get({})
    _limiters.set(limiters)
    limiter = limiters.setdefault((kind, at_once), anyio.CapacityLimiter(at_once))
    borrower = object()
    with clock_stopped():
        await limiter.acquire_on_behalf_of(borrower)
    return functools.partial(limiter.release_on_behalf_of, borrower)


def turn_begins() -> None:
    """Start the next turn of the current rollout, if there is one."""
    if (clock := _clock.get()) is not None:
        clock.begin_turn()


class Watch:
    """All clocks of a generation, checked inside `with watch:`.

    Args:
        timeout: seconds for which the code of one clock may have control.
        turn_timeout: the same for one turn of its rollout; None for no other limit.
        warned: places that block the event loop and have been named; the watch adds to them.
        warn_after: seconds for which the loop is blocked before the warning.
        spans: receives the times at which at least one clock runs.

    Attributes:
        seconds: time during which at least one clock ran.
        clocks: clocks whose code has not ended.
        is_stopping: `stop` was called.
    """

    def __init__(
        self,
        timeout: float,
        turn_timeout: float | None = None,
        warned: set[str] | None = None,
        warn_after: float = WARN_AFTER,
        spans: Spans = NO_SPANS,
    ) -> None:
        self.timeout = timeout
        self.turn_timeout = math.inf if turn_timeout is None else turn_timeout
        self.seconds = 0.0
        self.clocks: set[Clock] = set()
        self.is_stopping = False
        shortest = min(timeout / _CHECKS, self.turn_timeout / _CHECKS, warn_after / _LOOKS)
        self._interval = min(shortest, _LONGEST_INTERVAL)
        self._warned = set[str]() if warned is None else warned
        self._warn_after = warn_after
        self._spans = spans
        self._num_running = 0
        self._since = 0.0
        self._late = 0.0
        self._check_at = math.inf

    def __enter__(self) -> "Watch":
        self._loop = asyncio.get_running_loop()
        self._is_over = threading.Event()
        self._check()
        thread_id = threading.get_ident()
        threading.Thread(target=self._look, args=[thread_id], name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._timer.cancel()

    def stop(self) -> None:
        """Cancel the code of all clocks, now and from now on, unless it is shielded."""
        self.is_stopping = True
        for clock in self.clocks:
            clock.cancel_if_stopping()

    def time(self) -> float:
        """The time of clocks, which is stopped while the event loop is blocked."""
        return min(time.perf_counter(), self._check_at) - self._late

    def started(self) -> float:
        """Count a clock that starts; returns its time."""
        if self._num_running == 0:
            self._since = time.perf_counter()
        self._num_running += 1
        return self.time()

    def stopped(self) -> float:
        """Count a clock that stops; returns its time."""
        self._num_running -= 1
        if self._num_running == 0:
            now = time.perf_counter()
            self.seconds += now - self._since
            self._spans.add("environments", "score", self._since, now)
        return self.time()

    def _check(self) -> None:
        """Cancel overdue code, and schedule the next check."""
        now = time.perf_counter()
        self._late += max(now - self._check_at, 0.0)
        self._check_at = now + self._interval
        self._timer = self._loop.call_later(self._interval, self._check)
        for clock in self.clocks:
            clock.cancel_if_overdue()

    def _look(self, thread_id: int) -> None:
        """Warn, from a thread, about code that blocks the event loop."""
        while not self._is_over.wait(self._warn_after / _LOOKS):
            seconds = time.perf_counter() - self._check_at
            frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
            place = place_of(frame) if frame and seconds >= self._warn_after else None
            if place and place not in self._warned:
                self._warned.add(place)
                _logger.warning(
                    "%s has blocked the event loop, and with it all rollouts, for %.0f s: run long "
                    "computations in a worker process (es_cookbook.rl.grading.workers.in_worker)",
                    place,
                    seconds,
                )


class Clock:
    """Runs while the code inside `with clock:` has control.

    The code is cancelled when the clock is overdue; the `with` statement then ends quietly, and
    `overdue_at` is the traceback. It is also cancelled when the watch stops, unless it is shielded.

    Attributes:
        watch: the one that checks it.
        overdue_at: place in the code at which it was cancelled.
        reason: why it was cancelled, in one line; None if it was not, or by others.
    """

    def __init__(self, watch: Watch, *, is_shielded: bool = False) -> None:
        self.watch = watch
        self.reason: str | None = None
        self.overdue_at: str | None = None
        self._is_shielded = is_shielded
        self._num_waiting = 0
        self._spent = 0.0
        self._spent_before_turn = math.inf  # No turn has started.
        self._since = 0.0

    def __enter__(self) -> None:
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        self.watch.clocks.add(self)
        self.cancel_if_stopping()
        _clock.set(self)
        self._since = self.watch.started()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        self._spent += self.watch.stopped() - self._since
        _clock.set(None)
        self.watch.clocks.discard(self)
        ended_quietly = self._scope.__exit__(kind, error, where)
        del self._scope  # It refers to the task, and its traceback to this.
        if ended_quietly and error is not None:
            self.overdue_at = "".join(traceback.format_exception(error))
        else:
            self.reason = None  # It was done all the same.
        return ended_quietly

    @property
    def is_stopping(self) -> bool:
        """Whether the code is cancelled because the watch stops."""
        return self.watch.is_stopping and not self._is_shielded

    def begin_turn(self) -> None:
        """End the turn, if there is one, and begin the next."""
        if self.watch.turn_timeout < math.inf:
            self._spent_before_turn = self._spent + self.watch.time() - self._since

    def wait(self) -> None:
        """Stop while the engine has control. Waits may overlap; each ends with `go_on`."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._spent += self.watch.stopped() - self._since

    def go_on(self) -> None:
        """End one wait."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._since = self.watch.started()

    def cancel_if_overdue(self) -> None:
        """Cancel the code if it has had control for too long."""
        if self._num_waiting:
            return
        spent, watch = self._spent + self.watch.time() - self._since, self.watch
        if spent - self._spent_before_turn >= watch.turn_timeout:
            limit = f"a turn not done after {watch.turn_timeout:g} s (turn_timeout)"
        elif spent >= watch.timeout:
            limit = f"not done after {watch.timeout:g} s (rollout_timeout)"
        else:
            return
        self.reason = f"TimeoutError: {limit}"
        self._scope.cancel()

    def cancel_if_stopping(self) -> None:
        """Cancel the code if its result is no longer needed."""
        if self.is_stopping:
            self._scope.cancel()


def place_of(frame: FrameType) -> str | None:
    """The innermost method of an Env, its group or its builder: `Slow.grade (env.py:12)`."""
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        for name in (*code.co_varnames[: min(code.co_argcount, 1)], *code.co_freevars):
            if issubclass(type(at.f_locals.get(name)), Env | EnvGroup | EnvGroupBuilder):
                return f"{code.co_qualname} ({code.co_filename}:{at.f_lineno})"
        at = at.f_back
    return None


_ends: list[Callable[[], None]] = []


def at_end_of_run(end: Callable[[], None]) -> None:
    """Have a function called when a run ends: for processes that its rollouts have started."""
    _ends.append(end)


def end_of_run() -> None:
    """Call the functions that were given to `at_end_of_run`."""
    for end in _ends:
        end()
