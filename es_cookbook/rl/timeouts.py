"""How long an Env may have control, in a rollout and in a turn: one clock per rollout, one watch.

A rollout waits for the engine most of the time, and how long depends on the population, not on its
Env. So its clock is stopped while it waits, and only an Env that keeps control too long (a hung
grader, a judge that never answers) is overdue. One timer checks all clocks periodically, at a
thousandth of the cost of one timer per rollout.

An Env that awaits is cancelled when it is overdue. One that does not is the business of the
watchdog (`es_cookbook.rl.watchdog`), which each turn of the watch puts off. Others lose nothing by
it: clocks stand still while the loop is late.
"""

import asyncio
import contextlib
import math
import time
import traceback
from collections.abc import AsyncGenerator, Generator
from types import TracebackType

import anyio
from anyio.lowlevel import RunVar

from es_cookbook.common.spans import NO_SPANS, Spans
from es_cookbook.rl.watchdog import GUEST, WARN_AFTER, Guest, Interrupted, Watchdog

CHECKS_PER_TIMEOUT = 8
"""How often the watch checks: an Env is stopped at most an eighth of the time-out late."""
_limiters: RunVar[dict[tuple[str, int], anyio.CapacityLimiter]] = RunVar("_limiters")


@contextlib.contextmanager
def nobody_has_control() -> Generator[None]:
    """Inside, the clock of the rollout that this is called in, if any, stands still."""
    guest = GUEST.get()
    if not isinstance(guest, Clock):
        yield
        return
    guest.wait()
    try:
        yield
    finally:
        guest.go_on(guest)


@contextlib.asynccontextmanager
async def in_turn(kind: str, at_once: int) -> AsyncGenerator[None]:
    """Inside, at most so many of a kind on this event loop; the clock stands still in the queue."""
    limiters = _limiters.get({})
    _limiters.set(limiters)
    limiter = limiters.setdefault((kind, at_once), anyio.CapacityLimiter(at_once))
    with nobody_has_control():
        await limiter.acquire()
    try:
        yield
    finally:
        limiter.release()


def turn_begins() -> None:
    """The rollout that this is called in, if any, begins a turn."""
    guest = GUEST.get()
    if isinstance(guest, Clock):
        guest.begin_turn()


class Watch:
    """All clocks of a generation, overdue after `timeout` seconds of one of them.

    So is a clock after `turn_timeout` seconds of one turn of its rollout.

    Checks them inside `with watch:`. A warning names what holds the event loop for more than
    `warn_after` seconds, unless it is in `warned` already, to which it is then added.

    `seconds` is the time during which at least one was running, told to `spans` piece by piece;
    `clocks` have not ended. `stop` cancels the bodies of all clocks, now and from now on.
    """

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
        warned = set() if warned is None else warned
        self.watchdog = Watchdog(self._shortest, warn_after, warned)
        self._spans = spans
        self._num_running = 0
        self._since = 0.0
        self._late = 0.0
        self._turn_at = math.inf
        self._check_at = 0.0

    def __enter__(self) -> "Watch":
        self._loop = asyncio.get_running_loop()
        self.watchdog.start()
        self._wait(time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.stop()
        self._timer.cancel()

    def stop(self) -> None:
        """Nobody wants what the bodies do any more; those that are shielded go on."""
        self.is_stopping = True
        for clock in self.clocks:
            clock.cancel_if_stopping()

    def _wait(self, now: float) -> None:
        self._turn_at = now + self.watchdog.interval
        self._timer = self._loop.call_later(self.watchdog.interval, self._turn)

    def _turn(self) -> None:
        now = time.perf_counter()
        self._late += max(now - self._turn_at, 0.0)
        self._wait(now)
        self.watchdog.turn()
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


class Clock:
    """Runs while the code inside `with clock:` has control.

    The body is cancelled when the clock is overdue, and interrupted when it holds the event loop
    for as long; the `with` statement then ends quietly, and `overdue_at` is the traceback of the
    place. It is cancelled, too, when the watch stops, unless it is shielded.

    Attributes:
        watchdog: the watch's.
        has_control: whether the clock is running.
        interrupted: where the body held the event loop, in one line; None if it never did.
        limit: seconds for which the body may hold it, and the option that says so.
        overdue_at: where the body was when it was stopped.
    """

    def __init__(self, watch: Watch, *, is_shielded: bool = False) -> None:
        self.watchdog = watch.watchdog
        self.has_control = False
        self.interrupted: str | None = None
        self.overdue_at: str | None = None
        self._watch = watch
        self._is_shielded = is_shielded
        self._num_waiting = 0
        self._spent = 0.0
        self._spent_before_turn = math.inf  # no turn has begun
        self._turn_is_overdue = False
        self._since = 0.0
        self.limit = watch.limits[0]

    def __enter__(self) -> None:
        # As made by `anyio.CancelScope()`, which initialises what this has initialised.
        self._scope = anyio.CancelScope.__new__(anyio.CancelScope)
        self._scope.__enter__()
        self._watch.clocks.add(self)
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
        self._watch.clocks.discard(self)
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
                seconds = self._watch.turn_timeout
                return f"TimeoutError: a turn not done after {seconds:g} s (turn_timeout)"
            return f"TimeoutError: not done after {self._watch.timeout:g} s (rollout_timeout)"
        return None

    def begin_turn(self) -> None:
        """What was spent until now counts towards no turn, or to the one that ends."""
        watch = self._watch
        if watch.turn_timeout < math.inf:
            self._spent_before_turn = self._spent + watch.time() - self._since
            self.limit = min(watch.limits)

    def wait(self) -> Guest | None:
        """Stop: the engine has control now. Waits may overlap; `go_on` takes what this returns."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._stop()
        guest = GUEST.get()
        GUEST.set(None)
        return guest

    def go_on(self, guest: Guest | None) -> None:
        """One wait is over."""
        GUEST.set(guest)
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._start()

    def cancel_if_overdue(self) -> None:
        """Cancel the body if it has had control for too long."""
        if self._num_waiting == 0:
            spent = self._spent + self._watch.time() - self._since
            self._turn_is_overdue = spent - self._spent_before_turn >= self._watch.turn_timeout
            if self._turn_is_overdue or spent >= self._watch.timeout:
                self._scope.cancel()

    @property
    def is_stopping(self) -> bool:
        """Whether the body is cancelled because the watch stops."""
        return self._watch.is_stopping and not self._is_shielded

    def cancel_if_stopping(self) -> None:
        """Cancel the body if nobody wants it any more."""
        if self.is_stopping:
            self._scope.cancel()

    def _start(self) -> None:
        self._since = self._watch.started()
        self.has_control = True

    def _stop(self) -> None:
        self.has_control = False
        self._spent += self._watch.stopped() - self._since
