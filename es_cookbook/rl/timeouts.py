"""How long an Env may have control: one clock per rollout, one watch for all of them.

A rollout waits for the engine most of the time, and how long depends on the population, not on its
Env. So its clock is stopped while it waits, and only an Env that keeps control too long (a hung
grader, a judge that never answers) is overdue. One task checks all clocks periodically, at a
thousandth of the cost of one timer per rollout.

Left out: interrupting an Env that never awaits. Nothing on the event loop can; CPU-heavy grading
belongs in a worker process.
"""

import time
import traceback
from types import TracebackType

import anyio

CHECKS_PER_TIMEOUT = 8
"""How often the watch checks: an Env is stopped at most an eighth of the time-out late."""


class Watch:
    """All clocks of a generation, overdue after `timeout` seconds of one of them.

    `seconds` is the time during which at least one was running; `clocks` have not ended.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.seconds = 0.0
        self.clocks: set[Clock] = set()
        self._num_running = 0
        self._since = 0.0

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await anyio.sleep(self.timeout / CHECKS_PER_TIMEOUT)
            for clock in self.clocks:
                clock.cancel_if_overdue()

    def started(self, now: float) -> None:
        """A clock started."""
        if self._num_running == 0:
            self._since = now
        self._num_running += 1

    def stopped(self, now: float) -> None:
        """A clock stopped."""
        self._num_running -= 1
        if self._num_running == 0:
            self.seconds += now - self._since


class Clock:
    """Runs while the code inside `with clock:` has control.

    The body is cancelled when the clock is overdue; the `with` statement then ends quietly, and
    `overdue_at` is the traceback of the place where it was cancelled.
    """

    __slots__ = ("_num_waiting", "_scope", "_since", "_spent", "_watch", "overdue_at")

    def __init__(self, watch: Watch) -> None:
        self.overdue_at: str | None = None
        self._watch = watch
        self._scope = anyio.CancelScope()
        self._num_waiting = 0
        self._spent = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._scope.__enter__()
        self._watch.clocks.add(self)
        self._start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        self._stop()
        self._watch.clocks.discard(self)
        ended_quietly = self._scope.__exit__(kind, error, where)
        if self._scope.cancelled_caught and error is not None:
            self.overdue_at = "".join(traceback.format_exception(error))
        return bool(ended_quietly)

    def wait(self) -> None:
        """Stop: the engine has control now. Waits may overlap."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._stop()

    def go_on(self) -> None:
        """One wait is over."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._start()

    def cancel_if_overdue(self) -> None:
        """Cancel the body if it has had control for too long."""
        if self._num_waiting == 0:
            spent = self._spent + time.perf_counter() - self._since
            if spent >= self._watch.timeout:
                self._scope.cancel()

    def _start(self) -> None:
        self._since = time.perf_counter()
        self._watch.started(self._since)

    def _stop(self) -> None:
        now = time.perf_counter()
        self._spent += now - self._since
        self._watch.stopped(now)
