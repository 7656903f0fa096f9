"""Interrupts code of others that holds the event loop, where it stands.

Code that does not await cannot be cancelled, and while it runs nothing else does: no rollout, no
time-out, no clean end. A signal reaches it: Python runs signal handlers in the main thread, between
two bytecodes of whatever runs there, and in the middle of a sleep, a read, a lock or a regular
expression. So the handler is the watchdog. It sees which code it has interrupted and since when
that has held the loop, and raises `Interrupted` there, again and again until the code lets go.

An alarm sends the signal, SIGURG: almost nobody uses it, and it is ignored where nobody handles it.
Every turn of the loop puts the alarm off, so nothing is sent while the loop goes round. On Linux
the alarm is a timer of the kernel, because a regular expression never lets another Python thread
run. Elsewhere it is a thread.

Left out: what no signal handler can reach. A C extension that never checks for signals is
interrupted as soon as it returns to Python; it belongs in a worker process
(`es_cookbook.rl.grading.workers.in_worker`). A loop outside the main thread is warned about only.
"""

import asyncio
import contextvars
import ctypes
import functools
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Protocol

from es_cookbook.rl.types import Env, EnvGroup, EnvGroupBuilder

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


class Interrupted(BaseException):
    """Raised in code that held the event loop too long.

    No `Exception`, so that it gets through code that expects those.
    """


class Guest(Protocol):
    """Code of others on the event loop: one rollout's Env, and the tasks that it has started.

    Attributes:
        watchdog: whose time-out holds for it.
        has_control: whether it may be interrupted now.
        limit: seconds for which it may hold the loop, and the option that says so.
        interrupted: where it was, in one line; None if it never was.
    """

    watchdog: "Watchdog"
    has_control: bool
    interrupted: str | None
    limit: tuple[float, str]


GUEST: contextvars.ContextVar[Guest | None] = contextvars.ContextVar("guest", default=None)
"""Whose code runs; the tasks that it starts inherit it."""


class Watchdog:
    """Watches one event loop, from `start` to `stop`, both called in its thread.

    Args:
        timeout: the least of the seconds for which guests may hold the loop without a break.
        warn_after: seconds after which a warning says who does.
        warned: places of which it has been said; grows.
    """

    in_main_thread: ClassVar[set["Watchdog"]] = set()
    """Those in the main thread, which share the signal's handler."""
    _former_handlers: ClassVar[list[Any]] = []

    def __init__(self, timeout: float, warn_after: float, warned: set[str]) -> None:
        self.interval = min(timeout / LOOKS, warn_after / LOOKS, LONGEST_INTERVAL)
        self._warn_after = warn_after
        self._warned = warned
        self._num_turns = 0
        self._holding: tuple[object, int] = (None, 0)
        self._told = self._holding
        self._since = 0.0
        self._patience = math.inf

    def start(self) -> None:
        """Begin to watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._patience = math.inf
        if threading.current_thread() is not threading.main_thread():
            self._alarm = _ThreadAlarm(self._only_warn)
        else:
            if not self.in_main_thread:
                self._former_handlers.append(signal.signal(signal.SIGURG, _on_alarm))
            self.in_main_thread.add(self)
            self._alarm = _alarm_of_main_thread()
        self.turn()

    def turn(self) -> None:
        """The loop has gone round; to be called at least once an `interval`."""
        self._num_turns += 1
        self._alarm.put_off(2 * self.interval, self.interval)

    def stop(self) -> None:
        """Watch no more."""
        self._alarm.close()
        if self in self.in_main_thread:
            self.in_main_thread.remove(self)
            if not self.in_main_thread:
                former = self._former_handlers.pop()  # None if it is not Python's to put back.
                signal.signal(signal.SIGURG, former or signal.SIG_DFL)

    @classmethod
    def hurry_all(cls) -> None:
        """The run is to end, which needs its event loop: be patient no longer."""
        for watchdog in cls.in_main_thread:
            watchdog._patience = PATIENCE_AT_THE_END

    def rest(self) -> None:
        """Look again after an `interval`, and not before."""
        self._alarm.put_off(self.interval, self.interval)

    def look(self, guest: Guest, frame: FrameType) -> None:
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
            self._holding, self._since = holding, now
        return now - self._since

    def _only_warn(self) -> None:
        """Look from another thread, which cannot interrupt."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        if self._seconds_held() >= self._warn_after and frame and (place := place_of(frame)):
            self._warn(
                place, "; it cannot be interrupted, because the loop is not in the main thread"
            )

    def _warn(self, place: str, more: str) -> None:
        told, self._told = self._told, self._holding
        if told != self._holding and place not in self._warned:
            self._warned.add(place)
            _logger.warning(
                "%s has held the event loop for %g s, and with it the whole population%s: what "
                "takes long belongs in a worker process (es_cookbook.rl.grading.workers.in_worker)",
                place,
                self._warn_after,
                more,
            )


def _on_alarm(number: int, frame: FrameType | None) -> None:
    guest = GUEST.get()
    if guest is not None and frame is not None:
        guest.watchdog.look(guest, frame)
        return
    for watchdog in Watchdog.in_main_thread:
        watchdog.rest()


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
    """Whether it is code that would be left in disorder: the clocks, asyncio, anyio."""
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("asyncio", "anyio") or module in _OWN_MODULES


_OWN_MODULES = (__name__, "es_cookbook.rl.timeouts")


class _Alarm(Protocol):
    def put_off(self, first: float, every: float) -> None:
        """Go off in so many seconds, and from then on periodically."""
        ...

    def close(self) -> None: ...


def _alarm_of_main_thread() -> _Alarm:
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
