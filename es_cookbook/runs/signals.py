"""Ctrl-C and SIGTERM: the first signal cancels a run cleanly, the second ends the process at once.

The first one cancels the run's task on the event loop, and everything is closed. That needs the
loop, so it waits for an Env that blocks it. The second one ends the process and its children with
exit code 130. So does SIGTERM if the process has not ended by itself after a few seconds, because
schedulers kill it next. The history on the disk is valid at any moment.

The same signal within a fifth of a second is the same one: `timeout`, `uv run` and other wrappers
pass on a signal that the process has already received as a member of their group.

Left out: C code that does not return to Python. Until it does, only SIGKILL ends the process.
"""

import asyncio
import contextlib
import contextvars
import os
import select
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Generic, TypeVar

import anyio
import psutil
from typing_extensions import override

from es_cookbook.common.terminal import INTERRUPTED, handled, interrupted

_Result = TypeVar("_Result")
_SECONDS_AFTER_SIGTERM = 8.0
_SECONDS_OF_ONE = 0.2
_advice = ""


def advise(sentence: str) -> None:
    """Set the advice for a user who interrupts the program from now on."""
    global _advice
    _advice = sentence


def advice() -> str:
    """The current advice; "" if none was set since the command began."""
    return _advice


def result_until_signal(main: Callable[[], Awaitable[_Result]], message: str = "") -> _Result:
    """Run `main` on an event loop and return its result, unless a signal comes.

    If a loop runs in this thread already, as in a notebook, `main` runs in another thread.

    Raises:
        KeyboardInterrupt: A signal came; with this message.
    """
    run = _Run(main)
    with _end_on_signals(run.stop):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            run.until_end()
        else:
            context = contextvars.copy_context()  # The cell's, so that output appears below it.
            with ThreadPoolExecutor(1, "run") as thread:
                thread.submit(context.run, run.until_end).result()
    if not run.results:
        raise KeyboardInterrupt(message)
    return run.results[0]


class _Run(Generic[_Result]):
    """A coroutine on its own loop; `results` is empty if it was stopped."""

    def __init__(self, main: Callable[[], Awaitable[_Result]]) -> None:
        self.results: list[_Result] = []
        self._main = main
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Threads(thread_name_prefix="asyncio"))
        self._scope: anyio.CancelScope | None = None
        self._is_stopped = False

    def until_end(self) -> None:
        with (
            contextlib.suppress(KeyboardInterrupt),  # An Env's own.
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
        ):
            runner.get_loop().run_until_complete(self._run())

    def stop(self) -> None:
        """Cancel it, from any thread."""
        with contextlib.suppress(RuntimeError):  # The loop has just been closed.
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._is_stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self) -> None:
        with anyio.CancelScope() as self._scope:
            if self._is_stopped:
                self._scope.cancel()
            self.results.append(await self._main())


class _Threads(ThreadPoolExecutor):
    """Threads of a loop (`asyncio.to_thread`), which after a signal closes without them."""

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait and not interrupted.is_set(), cancel_futures=cancel_futures)


@contextlib.contextmanager
def _end_on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Inside, the first Ctrl-C or SIGTERM calls `stop`, and the second ends the process.

    Signals stay as they are outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted.clear()
    advise("")
    first: list[tuple[int, float]] = []
    process = os.getpid()

    def received(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # A forked child.
            os._exit(INTERRUPTED)
        if number == signal.SIGTERM and not first:
            signal.setitimer(signal.ITIMER_REAL, _SECONDS_AFTER_SIGTERM)
        if not first:
            first.append((number, time.monotonic()))
            interrupted.set()
            stop()
        elif number != first[0][0] or time.monotonic() - first[0][1] >= _SECONDS_OF_ONE:
            _end_now()

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGALRM), received):
        try:
            yield
        finally:
            if first:
                signal.setitimer(signal.ITIMER_REAL, 0)


def _end_now() -> None:
    """End this process and its children, and print the advice."""
    sentence = "interrupted; it did not end by itself and was ended"
    line = "; ".join(filter(None, (sentence, _advice))) + "\n"
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:  # A full pipe would block.
            os.write(2, line.encode("utf-8", "backslashreplace"))
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(INTERRUPTED)
