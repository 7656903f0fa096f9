"""Ctrl-C and SIGTERM: the first signal cancels a run cleanly, the second ends the process at once.

The first one cancels the run's task on the event loop, and everything is closed. That needs the
loop, so it waits for an Env that blocks it. The second one ends the process and its children with
exit code 130. So does SIGTERM if the process has not ended by itself after a few seconds, because
schedulers kill it next. The history on the disk is valid at any moment.

A thread handles the signals, because Python handlers would wait until the main thread returns from
a long call. Left out: C code that never releases the interpreter lock, where only SIGKILL helps.

The same signal within a fifth of a second is the same one: `timeout`, `uv run` and other wrappers
pass on a signal that the process has already received as a member of their group.
"""

import asyncio
import contextlib
import contextvars
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TypeVar

import anyio
import psutil

from es_cookbook.common.terminal import INTERRUPTED, handled, interrupted

_Result = TypeVar("_Result")
_SECONDS_AFTER_SIGTERM = 8.0
_SECONDS_OF_ONE = 0.2
_SIGNALS = signal.SIGINT, signal.SIGTERM
_advice = ""


def advise(sentence: str) -> None:
    """Set the advice for a user who interrupts the program from now on."""
    global _advice
    _advice = sentence


def advice() -> str:
    """Return the current advice; "" if none was set since the command began."""
    return _advice


def result_until_signal(main: Callable[[], Awaitable[_Result]], message: str = "") -> _Result:
    """Run `main` on an event loop and return its result, unless a signal comes.

    If a loop runs in this thread already, as in a notebook, `main` runs in another thread.

    Raises:
        KeyboardInterrupt: A signal came; with this message.
    """
    results: list[_Result] = []
    scopes: list[anyio.CancelScope] = []
    loop = asyncio.new_event_loop()

    async def until_cancelled() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            if interrupted.is_set():
                scope.cancel()
            results.append(await main())

    def until_end() -> None:
        with (
            contextlib.suppress(KeyboardInterrupt),  # An Env's own.
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            runner.run(until_cancelled())

    def cancel() -> None:
        # A loop that closes waits for the threads of its executor: now not for those of before.
        loop.set_default_executor(ThreadPoolExecutor())
        for scope in scopes:
            scope.cancel()

    with _until_signal(lambda: loop.call_soon_threadsafe(cancel)):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            until_end()
        else:
            context = contextvars.copy_context()  # The cell's, so that output appears below it.
            with ThreadPoolExecutor(1, "run") as thread:
                thread.submit(context.run, until_end).result()
    if not results:
        raise KeyboardInterrupt(message)
    return results[0]


@contextlib.contextmanager
def _until_signal(stop: Callable[[], object]) -> Generator[None]:
    """Call `stop` at the first Ctrl-C or SIGTERM in the block; end the process at the second.

    Signals stay as they are outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted.clear()
    advise("")
    received, wakes = socket.socketpair()
    wakes.setblocking(False)
    with wakes, handled(_SIGNALS, _leave_to_thread):
        former = signal.set_wakeup_fd(wakes.fileno())
        threading.Thread(target=_attend, args=(received, stop), daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(former)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: its C part has written the number to the socket."""


def _forked() -> None:
    """Stop a forked child from writing signals to the socket of its parent."""
    if signal.getsignal(signal.SIGTERM) is _leave_to_thread:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forked)


def _attend(received: socket.socket, stop: Callable[[], object]) -> None:
    """Handle the signals whose numbers are received, until the other end is closed."""
    began = math.inf
    timer = threading.Timer(_SECONDS_AFTER_SIGTERM, _end_now)
    timer.daemon = True
    with received, contextlib.suppress(RuntimeError):  # The loop has just been closed.
        for (number,) in iter(lambda: received.recv(1), b""):
            if number in _SIGNALS and time.monotonic() - began >= _SECONDS_OF_ONE:
                _end_now()
            elif number in _SIGNALS and began == math.inf:
                began = time.monotonic()
                interrupted.set()
                if number == signal.SIGTERM:
                    timer.start()
                stop()
    timer.cancel()


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
