"""Ctrl-C and SIGTERM: the first ends a run cleanly, the second at once.

A clean end needs the event loop: rollouts are cancelled, and everything is closed. An Env that
holds the loop is interrupted first (`es_cookbook.rl.watchdog`). The second signal raises
`KeyboardInterrupt` wherever the program stands. Where that does not end it either, because
something swallows it or never comes back to Python, a thread ends the process: seconds after the
second signal, and after SIGTERM in any case, since whoever sends that kills next. The history
on the disk is good at any moment.

Left out: an end where code holds the interpreter lock for ever, a C extension that neither checks
for signals nor lets other threads run. Only SIGKILL ends that.
"""

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TypeAlias

import anyio

from es_cookbook.rl.watchdog import Watchdog

SECONDS_AFTER_SIGTERM = 8.0
"""Within which a clean end has to be done."""
SECONDS_AFTER_SECOND = 2.0
"""Within which the second signal has to have worked."""
INTERRUPTED = 130
"""The exit code."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_OnBegin: TypeAlias = Callable[[Callable[[], None]], None]
"""Is told how to stop what has begun."""


def run_until_signal(main: Callable[[], Awaitable[None]]) -> bool:
    """Run `main` on an event loop until it ends (False) or a signal comes (True).

    A loop that is running here already, a notebook's, takes no other beside it: then `main` has one
    in a thread, for which this one waits.

    Raises:
        KeyboardInterrupt: A second signal came.
    """
    if not _is_loop_running():
        return _run(main)
    stops: list[Callable[[], None]] = []

    def stop() -> None:
        for each in stops:
            each()

    context = contextvars.copy_context()  # The cell's, so that what is printed is shown below it.

    def run() -> bool:
        return context.run(_run, main, stops.append)

    with end_on_signals(stop), ThreadPoolExecutor(1, "run") as thread:
        return thread.submit(run).result()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(main: Callable[[], Awaitable[None]], on_begin: _OnBegin | None = None) -> bool:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(_interrupted(main, on_begin))
        while True:
            try:
                return loop.run_until_complete(task)
            except SystemExit:
                # asyncio lets one of any task out of the loop. An Env's own task is the Env's
                # business, which is told as well and loses its rollout: go on.
                if task.done():
                    raise


async def _interrupted(main: Callable[[], Awaitable[None]], on_begin: _OnBegin | None) -> bool:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # The run has just ended, and its loop is closed.
            loop.call_soon_threadsafe(scope.cancel)

    with anyio.CancelScope() as scope, end_on_signals(stop):
        if on_begin:
            on_begin(stop)
        await main()
    return scope.cancelled_caught


@contextlib.contextmanager
def end_on_signals(stop: Callable[[], None]) -> Generator[None]:
    """Inside, the first Ctrl-C or SIGTERM calls `stop`, in the main thread, wherever that stands.

    Signals stay as they are where this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        for number in _NUMBERS:
            signal.signal(number, _second)
        Watchdog.hurry_all()
        stop()

    former = {number: signal.signal(number, first) for number in _NUMBERS}
    try:
        with _enforced():
            yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _second(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _enforced() -> Generator[None]:
    """Inside, a thread hears of every signal, also while the main thread is not in Python."""
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    with ours, pythons:
        former = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=_enforce, args=[ours], name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(former)
            pythons.shutdown(socket.SHUT_WR)
            thread.join()


def _enforce(signals: socket.socket) -> None:
    num_heard = 0
    end_at: float | None = None
    while True:
        signals.settimeout(None if end_at is None else max(end_at - time.monotonic(), 0.001))
        try:
            numbers = signals.recv(4096)
        except TimeoutError:
            os.write(2, b"interrupted; it did not end by itself and was ended\n")
            os._exit(INTERRUPTED)
        if not numbers:
            return
        for number in numbers:
            if number not in _NUMBERS:
                continue
            num_heard += 1
            if num_heard == 1 and number == signal.SIGINT:
                continue
            seconds = SECONDS_AFTER_SIGTERM if num_heard == 1 else SECONDS_AFTER_SECOND
            ends_at = time.monotonic() + seconds
            end_at = ends_at if end_at is None else min(end_at, ends_at)
