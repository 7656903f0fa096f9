"""How long an Env may have control, in a rollout and in a turn, and may hold the event loop.

A rollout waits for the engine most of the time, and how long depends on the population, not on its
Env. So its clock is stopped while it waits, and only an Env that keeps control too long (a hung
grader, a judge that never answers) is overdue. One timer checks all clocks periodically, at a
thousandth of the cost of one timer per rollout (or of a deadline of anyio's per rollout).

An Env that awaits is cancelled when it is overdue. One that does not await cannot be cancelled, and
while it runs nothing else does: no rollout, no time-out, no clean end. A signal reaches it: Python
runs signal handlers in the main thread, between two bytecodes of whatever runs there, and in the
middle of a sleep, a read, a lock or a regular expression. So the handler is the watchdog. It sees
which code it has interrupted and since when that has held the loop, and raises `Interrupted` there,
again and again until the code lets go. Others lose nothing by it: clocks stand still while the loop
is late.

An alarm sends the signal, SIGURG: almost nobody uses it, and it is ignored where nobody handles it.
Every turn of the loop puts the alarm off, so nothing is sent while the loop goes round. On Linux
the alarm is a timer of the kernel, because a regular expression never lets another Python thread
run. Elsewhere it is a thread.

Left out: what no signal handler can reach. A C extension that never checks for signals is
interrupted as soon as it returns to Python; it belongs in a worker process
(`es_cookbook.rl.grading.workers.in_worker`). A loop outside the main thread is warned about only.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import logging
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

import anyio
from anyio.lowlevel import RunVar

from es_cookbook.common.spans import NO_SPANS, Spans
from es_cookbook.rl.types import Env, EnvGroup, EnvGroupBuilder

CHECKS_PER_TIMEOUT = 8
"""How often the watch checks: an Env is stopped at most an eighth of the time-out late."""
_limiters: RunVar[dict[tuple[str, int], anyio.CapacityLimiter]] = RunVar("_limiters")
LOOKS = 8
"""How often the watchdog looks within a time-out: code is interrupted at most half of it late."""
LONGEST_INTERVAL = 0.5
"""Seconds between two looks, at most."""
WARN_AFTER = 5.0
"""Seconds after which it is said who holds the loop."""
PATIENCE_AT_THE_END = 0.5
"""Seconds for which code may hold the loop when the run is to end."""
_RELENTLESS = 20e-6
"""Seconds between alarms once code has swallowed one: it cannot go on for longer than that."""

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


GUEST: "contextvars.ContextVar[Clock | None]" = contextvars.ContextVar("guest", default=None)
"""The clock of the rollout whose code runs; the tasks that it starts inherit it."""


class Interrupted(BaseException):
    """Raised in code that held the event loop too long.

    No `Exception`, so that it gets through code that expects those.
    """


@contextlib.contextmanager
def nobody_has_control() -> Generator[None]:
    """Inside, the clock of the rollout that this is called in, if any, stands still."""
    guest = GUEST.get()
    if guest is None:
        yield
        return
    guest.wait()
    try:
        yield
    finally:
        guest.go_on(guest)


def in_background(work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
    """A task that is no guest's: not the user's code, and not to be interrupted in its midst."""
    context = contextvars.copy_context()
    context.run(GUEST.set, None)
    return asyncio.create_task(work, context=context)


@contextlib.asynccontextmanager
async def in_turn(kind: str, at_once: int) -> AsyncGenerator[None]:
    """Inside, at most so many of a kind on this event loop; the clock stands still in the queue."""
    release = await turn(kind, at_once)
    try:
        yield
    finally:
        release()


async def turn(kind: str, at_once: int) -> Callable[[], None]:
    """The same for what outlives the caller; returns what is called when it is over."""
    limiters = _limiters.get({})
    _limiters.set(limiters)
    limiter = limiters.setdefault((kind, at_once), anyio.CapacityLimiter(at_once))
    whose = object()
    with nobody_has_control():
        await limiter.acquire_on_behalf_of(whose)
    return functools.partial(limiter.release_on_behalf_of, whose)


def turn_begins() -> None:
    """The rollout that this is called in, if any, begins a turn."""
    if (guest := GUEST.get()) is not None:
        guest.begin_turn()


class Watch:
    """All clocks of a generation, overdue after `timeout` seconds of one of them.

    So is a clock after `turn_timeout` seconds of one turn of its rollout.

    Checks them inside `with watch:`. A warning names what holds the event loop for more than
    `warn_after` seconds, unless it is in `warned` already, to which it is then added.

    `seconds` is the time during which at least one was running, told to `spans` piece by piece;
    `clocks` have not ended. `stop` cancels the bodies of all clocks, now and from now on.
    """

    in_main_thread: ClassVar[set["Watch"]] = set()
    """Those in the main thread, which share the signal's handler."""
    _former_handlers: ClassVar[list[Any]] = []

    def __init__(
        self,
        timeout: float,
        warn_after: float = WARN_AFTER,
        warned: set[str] | None = None,
        turn_timeout: float | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        self.timeout = timeout
        self.turn_timeout = math.inf if turn_timeout is None else turn_timeout
        self.limits = ((timeout, "rollout_timeout"), (self.turn_timeout, "turn_timeout"))
        self.seconds = 0.0
        self.clocks: set[Clock] = set()
        self.is_stopping = False
        self._shortest = min(timeout, self.turn_timeout)
        self._interval = min(self._shortest / LOOKS, warn_after / LOOKS, LONGEST_INTERVAL)
        self._warn_after = warn_after
        self._warned = set[str]() if warned is None else warned
        self._num_turns = 0
        self._holding: tuple[object, int] = (None, 0)
        self._last_warned = self._holding
        self._held_since = 0.0
        self._patience = math.inf
        self._spans = spans
        self._num_running = 0
        self._since = 0.0
        self._late = 0.0
        self._turn_at = math.inf
        self._check_at = 0.0

    def __enter__(self) -> "Watch":
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._patience = math.inf
        if threading.current_thread() is not threading.main_thread():
            self._alarm = _ThreadAlarm(self._only_warn)
        else:
            if not self.in_main_thread:
                self._former_handlers.append(signal.signal(signal.SIGURG, _on_alarm))
            self._alarm = _alarm_of_main_thread()
            self.in_main_thread.add(self)
        self._wait(time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        self._alarm.close()
        if self in self.in_main_thread:
            self.in_main_thread.remove(self)
            if not self.in_main_thread:
                former = self._former_handlers.pop()  # None if it is not Python's to put back.
                signal.signal(signal.SIGURG, former or signal.SIG_DFL)
        self._timer.cancel()

    def stop(self) -> None:
        """Nobody wants what the bodies do any more; those that are shielded go on."""
        self.is_stopping = True
        for clock in self.clocks:
            clock.cancel_if_stopping()

    def _wait(self, now: float) -> None:
        """The loop has gone round: it is to come here again in an interval."""
        self._turn_at = now + self._interval
        self._timer = self._loop.call_later(self._interval, self._turn)
        self._num_turns += 1
        self._alarm.put_off(2 * self._interval, self._interval)

    def _turn(self) -> None:
        now = time.perf_counter()
        self._late += max(now - self._turn_at, 0.0)
        self._wait(now)
        if now >= self._check_at:
            self._check_at = now + self._shortest / CHECKS_PER_TIMEOUT
            for clock in self.clocks:
                clock.cancel_if_overdue()

    def time(self) -> float:
        """The time by which clocks go: it stands still while the event loop is late."""
        return min(time.perf_counter(), self._turn_at) - self._late

    def started(self) -> float:
        """A clock started; gives its time."""
        now = time.perf_counter()
        if self._num_running == 0:
            self._since = now
        self._num_running += 1
        return (now if now < self._turn_at else self._turn_at) - self._late

    def stopped(self) -> float:
        """A clock stopped; gives its time."""
        now = time.perf_counter()
        self._num_running -= 1
        if self._num_running == 0:
            self.seconds += now - self._since
            self._spans.add("environments", "score", self._since, now)
        return (now if now < self._turn_at else self._turn_at) - self._late

    @classmethod
    def hurry_all(cls) -> None:
        """The run is to end, which needs its event loop: be patient no longer."""
        for watch in cls.in_main_thread:
            watch._patience = PATIENCE_AT_THE_END

    def rest(self) -> None:
        """Look again after an interval, and not before."""
        self._alarm.put_off(self._interval, self._interval)

    def look(self, guest: "Clock", frame: FrameType) -> None:
        """Look at the code of a guest at which the alarm has gone off.

        Raises:
            Interrupted: It has held the loop for too long.
        """
        seconds = self._seconds_held()
        if seconds == 0:
            self.rest()
        if not guest.has_control or _is_machinery(frame):
            return
        limit, option = guest.limit
        if seconds >= min(limit, self._patience):
            if guest.interrupted is not None:
                self._alarm.put_off(_RELENTLESS, _RELENTLESS)
            why = f" ({option})" if limit <= self._patience else ""
            guest.interrupted = guest.interrupted or (
                f"{place_of(frame) or _shown(frame)} held the event loop for more than "
                f"{min(limit, self._patience):g} s without a break{why}"
            )
            raise Interrupted(guest.interrupted)
        if seconds >= self._warn_after:
            self._warn(place_of(frame) or _shown(frame), "")

    def _seconds_held(self) -> float:
        """For how long the same step of the same task has been running, as far as is known."""
        now = time.monotonic()
        holding = (asyncio.current_task(self._loop), self._num_turns)
        if holding != self._holding:
            self._holding, self._held_since = holding, now
        return now - self._held_since

    def _only_warn(self) -> None:
        """Look from another thread, which cannot interrupt."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        if self._seconds_held() >= self._warn_after and frame and (place := place_of(frame)):
            self._warn(
                place, "; it cannot be interrupted, because the loop is not in the main thread"
            )

    def _warn(self, place: str, more: str) -> None:
        last, self._last_warned = self._last_warned, self._holding
        if last != self._holding and place not in self._warned:
            self._warned.add(place)
            _logger.warning(
                "%s has held the event loop for %g s, and with it the whole population%s: what "
                "takes long belongs in a worker process (es_cookbook.rl.grading.workers.in_worker)",
                place,
                self._warn_after,
                more,
            )


class Clock:
    """Runs while the code inside `with clock:` has control.

    The body is cancelled when the clock is overdue, and interrupted when it holds the event loop
    for as long; the `with` statement then ends quietly, and `overdue_at` is the traceback of the
    place. It is cancelled, too, when the watch stops, unless it is shielded.

    Attributes:
        watch: the one that checks it.
        has_control: whether the clock is running.
        interrupted: where the body held the event loop, in one line; None if it never did.
        limit: seconds for which the body may hold it, and the option that says so.
        overdue_at: where the body was when it was stopped.
    """

    def __init__(self, watch: Watch, *, is_shielded: bool = False) -> None:
        self.watch = watch
        self.has_control = False
        self.interrupted: str | None = None
        self.overdue_at: str | None = None
        self._is_shielded = is_shielded
        self._num_waiting = 0
        self._spent = 0.0
        self._spent_before_turn = math.inf  # No turn has started.
        self._turn_is_overdue = False
        self._since = 0.0
        self.limit = watch.limits[0]

    def __enter__(self) -> None:
        # As made by `anyio.CancelScope()`, which initialises what this has initialised.
        self._scope = anyio.CancelScope.__new__(anyio.CancelScope)
        self._scope.__enter__()
        self.watch.clocks.add(self)
        self.cancel_if_stopping()
        GUEST.set(self)
        self._start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        self._stop()
        GUEST.set(None)
        self.watch.clocks.discard(self)
        ended_quietly = bool(self._scope.__exit__(kind, error, where))
        del self._scope
        if isinstance(error, Interrupted):
            ended_quietly = True
        if ended_quietly and error is not None:
            self.overdue_at = "".join(traceback.format_exception(error))
        return ended_quietly

    @property
    def reason(self) -> str | None:
        """Why the body was stopped, in one line; None if it was not, or stopped by others."""
        if self.interrupted is not None:
            return f"TimeoutError: {self.interrupted}"
        if self.overdue_at is not None:
            if self._turn_is_overdue:
                seconds = self.watch.turn_timeout
                return f"TimeoutError: a turn not done after {seconds:g} s (turn_timeout)"
            return f"TimeoutError: not done after {self.watch.timeout:g} s (rollout_timeout)"
        return None

    def begin_turn(self) -> None:
        """What was spent until now counts towards no turn, or to the one that ends."""
        watch = self.watch
        if watch.turn_timeout < math.inf:
            self._spent_before_turn = self._spent + watch.time() - self._since
            self.limit = min(watch.limits)

    def wait(self) -> "Clock | None":
        """Stop: the engine has control now. Waits may overlap; `go_on` takes what this returns."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._stop()
        guest = GUEST.get()
        GUEST.set(None)
        return guest

    def go_on(self, guest: "Clock | None") -> None:
        """One wait is over."""
        GUEST.set(guest)
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._start()

    def cancel_if_overdue(self) -> None:
        """Cancel the body if it has had control for too long."""
        if self._num_waiting == 0:
            spent = self._spent + self.watch.time() - self._since
            self._turn_is_overdue = spent - self._spent_before_turn >= self.watch.turn_timeout
            if self._turn_is_overdue or spent >= self.watch.timeout:
                self._scope.cancel()

    @property
    def is_stopping(self) -> bool:
        """Whether the body is cancelled because the watch stops."""
        return self.watch.is_stopping and not self._is_shielded

    def cancel_if_stopping(self) -> None:
        """Cancel the body if nobody wants it any more."""
        if self.is_stopping:
            self._scope.cancel()

    def _start(self) -> None:
        self._since = self.watch.started()
        self.has_control = True

    def _stop(self) -> None:
        self.has_control = False
        self._spent += self.watch.stopped() - self._since


def _on_alarm(number: int, frame: FrameType | None) -> None:
    guest = GUEST.get()
    if guest is not None and frame is not None:
        guest.watch.look(guest, frame)
        return
    for watch in Watch.in_main_thread:
        watch.rest()


def place_of(frame: FrameType) -> str | None:
    """The innermost method of an Env, its group or its builder: `Slow.grade (env.py:12)`."""
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        for name in (*code.co_varnames[: min(code.co_argcount, 1)], *code.co_freevars):
            if issubclass(type(at.f_locals.get(name)), Env | EnvGroup | EnvGroupBuilder):
                return _shown(at)
        at = at.f_back
    return None


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _is_machinery(frame: FrameType) -> bool:
    """Whether it is code that would be left in disorder: the clocks, what ends them, asyncio."""
    module = frame.f_globals.get("__name__", "")
    return module in _OWN or module.partition(".")[0] in ("asyncio", "anyio")


_OWN = (__name__, "es_cookbook.population.group")


def _alarm_of_main_thread() -> "_KernelAlarm | _ThreadAlarm":
    """An alarm that has Python run SIGURG's handler in the main thread."""
    try:
        return _KernelAlarm()
    except (AttributeError, OSError):  # Not Linux, or one that lends no timers.
        main_thread = threading.get_ident()
        return _ThreadAlarm(functools.partial(signal.pthread_kill, main_thread, signal.SIGURG))


class _KernelAlarm:
    """A POSIX timer that sends SIGURG to this very thread."""

    class _Event(ctypes.Structure):
        _fields_ = (
            ("value", ctypes.c_void_p),
            ("signal", ctypes.c_int),
            ("notify", ctypes.c_int),
            ("thread", ctypes.c_int),
            ("rest", ctypes.c_byte * 44),
        )

    _Times = ctypes.c_long * 4
    """Seconds and nanoseconds of the interval, then of the first time."""
    _SIGEV_THREAD_ID = 4

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set, self._delete = libc.timer_settime, libc.timer_delete
        self._timer = ctypes.c_void_p()
        thread = threading.get_native_id()
        event = self._Event(None, signal.SIGURG, self._SIGEV_THREAD_ID, thread)
        if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def put_off(self, first: float, every: float) -> None:
        times = self._Times(int(every), int(every % 1 * 1e9), int(first), int(first % 1 * 1e9))
        self._set(self._timer, 0, times, None)

    def close(self) -> None:
        self._delete(self._timer)


class _ThreadAlarm:
    """A thread that calls a function."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._rings_at = self._every = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def put_off(self, first: float, every: float) -> None:
        self._rings_at, self._every = time.monotonic() + first, every
        if not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            if time.monotonic() >= self._rings_at:
                self._ring()
