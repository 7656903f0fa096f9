"""Time limits of rollouts, and a warning about Envs that block the event loop.

A rollout waits for the engine most of the time, and how long depends on the population, not on its
Env. So its clock is stopped while it waits, and only an Env that keeps control for too long (a hung
grader, a judge that never answers) is cancelled. One timer for all rollouts advances the clocks
that run; when the event loop is blocked it does not fire, so no rollout is lost because of another.

An Env that computes or sleeps without awaiting cannot be cancelled, and while it runs nothing else
does. A thread warns which method blocks the loop. Such code belongs in a worker process, which is
killed at its time-out (`es_cookbook.rl.grading.workers.in_worker`).
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator
from types import FrameType

import anyio
from anyio.lowlevel import RunVar

from es_cookbook.common.machine.spans import NO_SPANS, Spans
from es_cookbook.rl.types import Env, EnvGroup, EnvGroupBuilder

WARN_AFTER = 5.0
"""Seconds for which the event loop is blocked before the warning."""
_TICKS = 8
"""Ticks per time-out: an Env is cancelled at most an eighth of it late."""
_LONGEST_TICK = 1.0
"""Upper limit of a tick, in seconds."""

_logger = logging.getLogger(__name__)
_semaphores: RunVar[dict[tuple[str, int], asyncio.Semaphore]] = RunVar("_semaphores")
_clock: "contextvars.ContextVar[Clock | None]" = contextvars.ContextVar("clock", default=None)
"""The clock of the rollout whose code runs; the tasks that it starts inherit it."""
_warned: set[str] = set()
"""Places that have been named in a warning."""


def clock_stopped() -> contextlib.AbstractContextManager[None]:
    """Stop the clock of the current rollout, if there is one, for a block."""
    clock = _clock.get()
    return contextlib.nullcontext() if clock is None else clock.stopped()


@contextlib.asynccontextmanager
async def in_turn(kind: str, at_once: int) -> AsyncGenerator[None]:
    """Limit concurrency per kind on this event loop; the clock stops while waiting."""
    release = await turn(kind, at_once)
    try:
        yield
    finally:
        release()


async def turn(kind: str, at_once: int) -> Callable[[], None]:
    """Wait as `in_turn` for work that outlives the caller; returns the function that ends it."""
    semaphores = _semaphores.get({})
    _semaphores.set(semaphores)
    semaphore = semaphores.setdefault((kind, at_once), asyncio.Semaphore(at_once))
    with clock_stopped():
        await semaphore.acquire()
    return semaphore.release


def turn_begins() -> None:
    """Start the next turn of the current rollout, if there is one."""
    if (clock := _clock.get()) is not None:
        clock.begin_turn()


class Watch:
    """All clocks of a generation, which advance inside `with watch:`.

    Args:
        timeout: seconds for which the code of one clock may have control.
        turn_timeout: the same for one turn of its rollout; None for no other limit.
        spans: receives the times at which at least one clock runs.

    Attributes:
        tick: seconds by which clocks advance at once.
        seconds: time during which at least one clock ran.
        clocks: clocks whose code has not ended.
        is_stopping: `stop` was called.
    """

    def __init__(
        self, timeout: float, turn_timeout: float | None = None, spans: Spans = NO_SPANS
    ) -> None:
        self.timeout = timeout
        self.turn_timeout = math.inf if turn_timeout is None else turn_timeout
        self.tick = min(timeout / _TICKS, self.turn_timeout / _TICKS, _LONGEST_TICK)
        self.seconds = 0.0
        self.clocks: set[Clock] = set()
        self.is_stopping = False
        self._spans = spans
        self._num_running = 0
        self._since = 0.0

    def __enter__(self) -> "Watch":
        self._loop = asyncio.get_running_loop()
        self._is_over = threading.Event()
        self._advance()
        thread_id = threading.get_ident()
        threading.Thread(target=self._warn, args=[thread_id], name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._timer.cancel()

    def stop(self) -> None:
        """Cancel the code of all clocks, now and from now on, unless it is shielded."""
        self.is_stopping = True
        for clock in self.clocks:
            clock.cancel_if_stopping()

    def started(self) -> None:
        """Count a clock that starts."""
        if self._num_running == 0:
            self._since = time.perf_counter()
        self._num_running += 1

    def stopped(self) -> None:
        """Count a clock that stops."""
        self._num_running -= 1
        if self._num_running == 0:
            now = time.perf_counter()
            self.seconds += now - self._since
            self._spans.add("environments", "score", self._since, now)

    def _advance(self) -> None:
        self._due = time.perf_counter() + self.tick
        self._timer = self._loop.call_later(self.tick, self._advance)
        for clock in self.clocks:
            clock.advance()

    def _warn(self, thread_id: int) -> None:
        """Warn, from a thread, about code that blocks the event loop."""
        while not self._is_over.wait(WARN_AFTER / 4):
            seconds = time.perf_counter() - self._due
            frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
            place = _method_of(frame) if seconds >= WARN_AFTER else None
            if place and place not in _warned:
                _warned.add(place)
                _logger.warning(
                    "%s has blocked the event loop, and with it all rollouts, for %.0f s: run long "
                    "computations in a worker process (es_cookbook.rl.grading.workers.in_worker)",
                    place,
                    seconds,
                )


class Clock:
    """Counts the ticks in which the code inside `with clock.running():` has control.

    The code is cancelled when the clock is overdue, and when the watch stops unless it is shielded.

    Attributes:
        watch: the one that advances it.
        overdue_at: traceback of the code that was cancelled.
        reason: why it was cancelled, in one line; None if it was not, or by others.
    """

    def __init__(self, watch: Watch, *, is_shielded: bool = False) -> None:
        self.watch = watch
        self.reason: str | None = None
        self.overdue_at: str | None = None
        self._is_shielded = is_shielded
        self._num_waiting = 0
        self._ticks = 0
        self._ticks_before_turn = math.inf  # No turn has started.

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Run the clock for a block, which ends quietly if it is overdue."""
        with anyio.CancelScope() as self._scope:
            self.watch.clocks.add(self)
            self.cancel_if_stopping()
            _clock.set(self)
            self.watch.started()
            try:
                yield
            except asyncio.CancelledError as error:
                self.overdue_at = "".join(traceback.format_exception(error))
                raise
            finally:
                self.watch.stopped()
                _clock.set(None)
                self.watch.clocks.discard(self)
        del self._scope  # It refers to the task, and its traceback to this.

    @property
    def is_stopping(self) -> bool:
        """Whether the code is cancelled because the watch stops."""
        return self.watch.is_stopping and not self._is_shielded

    def begin_turn(self) -> None:
        """End the turn, if there is one, and begin the next."""
        self._ticks_before_turn = self._ticks

    @contextlib.contextmanager
    def stopped(self) -> Generator[None]:
        """Stop the clock for a block in which the engine has control.

        Blocks may overlap, in tasks of the code.
        """
        self._num_waiting += 1
        if self._num_waiting == 1:
            self.watch.stopped()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self.watch.started()

    def advance(self) -> None:
        """Count a tick if the code has control, and cancel it if it has had that for too long."""
        if self._num_waiting:
            return
        self._ticks += 1
        watch = self.watch
        if (self._ticks - self._ticks_before_turn) * watch.tick > watch.turn_timeout:
            limit = f"a turn not done after {watch.turn_timeout:g} s (turn_timeout)"
        elif self._ticks * watch.tick > watch.timeout:
            limit = f"not done after {watch.timeout:g} s (rollout_timeout)"
        else:
            return
        self.reason = f"TimeoutError: {limit}"
        self._scope.cancel()

    def cancel_if_stopping(self) -> None:
        """Cancel the code if its result is no longer needed."""
        if self.is_stopping:
            self._scope.cancel()


def _method_of(frame: FrameType | None) -> str | None:
    """Return the innermost method of an Env, its group or builder: `Slow.grade (env.py:12)`."""
    while frame is not None:
        code = frame.f_code
        if issubclass(type(frame.f_locals.get("self")), Env | EnvGroup | EnvGroupBuilder):
            return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return None
