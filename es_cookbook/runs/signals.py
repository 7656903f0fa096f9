"""Ctrl-C and SIGTERM: the first ends a run cleanly, the second at once.

A clean end needs the event loop: rollouts are cancelled, and everything is closed. An Env that
holds the loop is interrupted first (`es_cookbook.rl.timeouts`). The second signal raises
`KeyboardInterrupt` wherever the program stands. Where that does not end it either, because
something swallows it or never comes back to Python, the process is ended: seconds after the
second signal, and after SIGTERM in any case, since whoever sends that kills next. The history
on the disk is good at any moment.

Who ends it is another process (`es_cookbook.common.machine.ending`), which hears every signal:
nothing that an Env does in this one can hold that up. It has this one exit with code 130, and kills
it (137) where C code holds the interpreter lock. It watches until the loop is closed with all of
its tasks. Where Python ends soon after a second signal, nothing waits for threads and exit
functions.

A signal that comes again within a fifth of a second is the same one: `timeout`, `uv run` and other
wrappers pass on what the process has got itself, as a member of their group.

What the user can do afterwards is known while all goes well (`advise`), and either process says it.

Left out: an Env that has the system ignore or block both signals. Nobody hears of them then.
"""

import asyncio
import contextlib
import contextvars
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TypeAlias, TypeVar

import anyio

from es_cookbook.common.machine import ending, left_threads
from es_cookbook.rl.timeouts import Watch

_Result = TypeVar("_Result")
INTERRUPTED = 130
"""The exit code."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SOON = 10.0
_OnBegin: TypeAlias = Callable[[Callable[[], None]], None]
"""Is told how to stop what has begun."""
_advice = ""


def advise(sentence: str) -> None:
    """Set what the user is told to do where the program is interrupted from now on."""
    global _advice
    _advice = sentence
    for end in _ends[-1:]:
        end.advise(sentence)


def advice() -> str:
    """What the user is told to do; "" where nothing was set since signals are heard."""
    return _advice


def result_until_signal(main: Callable[[], Awaitable[_Result]], interrupted: str = "") -> _Result:
    """Run `main` on an event loop and return its result, unless a signal comes.

    A loop that is running here already, a notebook's, takes no other beside it: then `main` has one
    in a thread, for which this one waits.

    Raises:
        KeyboardInterrupt: A signal came, or a second one; says `interrupted`.
    """
    stops: list[Callable[[], None]] = []
    found: list[_Result] = []

    def stop() -> None:
        for each in stops:
            each()

    async def keep() -> None:
        found.append(await main())

    try:
        with end_on_signals(stop):
            if not _is_loop_running():
                stopped = _run(keep, stops.append)
            else:
                context = contextvars.copy_context()  # The cell's: what is printed is shown below.
                with ThreadPoolExecutor(1, "run") as thread:
                    stopped = thread.submit(context.run, _run, keep, stops.append).result()
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        raise KeyboardInterrupt(interrupted)
    return found[0]


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(main: Callable[[], Awaitable[None]], on_begin: _OnBegin) -> bool:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(left_threads.LeavableThreads(thread_name_prefix="asyncio"))
        task = loop.create_task(_interrupted(main, on_begin))
        while True:
            try:
                return loop.run_until_complete(task)
            except SystemExit:
                # asyncio lets one of any task out of the loop. An Env's own task is the Env's
                # business, which is told as well and loses its rollout: go on.
                if task.done():
                    raise


async def _interrupted(main: Callable[[], Awaitable[None]], on_begin: _OnBegin) -> bool:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # The run has just ended, and its loop is closed.
            loop.call_soon_threadsafe(scope.cancel)

    with anyio.CancelScope() as scope:
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
        end.first = number, time.monotonic()
        for each in _NUMBERS:
            signal.signal(each, second)
        left_threads.is_ending.set()
        end.when_python_ends()
        Watch.hurry_all()
        stop()

    def second(number: int, frame: FrameType | None) -> None:
        if ending.is_same(number, end.first):
            return
        end.hurry()
        raise KeyboardInterrupt

    left_threads.is_ending.clear()
    end = _End()
    advise("")
    former = {number: signal.signal(number, first) for number in _NUMBERS}
    try:
        yield
    finally:
        end.close()
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _End:
    """The process that ends this one, from now on until `close`.

    After a second signal it stays, and watches again when Python ends soon afterwards.
    """

    def __init__(self) -> None:
        self.first: tuple[int, float] = 0, -math.inf
        self.second_at = -math.inf
        hears, self._pythons = os.pipe()
        self._ours, tells = os.pipe()
        advised, self._advises = os.pipe()
        for descriptor in (self._pythons, self._advises):
            os.set_blocking(descriptor, False)
        passed = hears, tells, advised
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", ending.__file__, *map(str, (*passed, os.getpid()))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is not for it.
        )
        for descriptor in passed:
            os.close(descriptor)
        threading.Thread(target=self._exit_when_told, name="signals", daemon=True).start()
        self._former = signal.set_wakeup_fd(self._pythons, warn_on_full_buffer=False)
        _hearing.append(self._pythons)
        _ends.append(self)

    def close(self) -> None:
        """The process goes on."""
        signal.set_wakeup_fd(self._former)
        _hearing.remove(self._pythons)
        _ends.remove(self)
        if self.second_at > -math.inf:
            self._say(ending.STAND_BY)
        else:
            self._process.kill()
            self._process.wait()
            os.close(self._pythons)
            os.close(self._advises)

    def advise(self, sentence: str) -> None:
        """What the process says if it ends this one."""
        with contextlib.suppress(OSError):  # It is full: so many sentences are never set.
            os.write(self._advises, sentence.encode("utf-8", "backslashreplace") + b"\n")

    def hurry(self) -> None:
        """There was a second signal; heard already, unless an Env took the descriptor."""
        self.second_at = time.monotonic()
        self._say(ending.SECOND)

    def when_python_ends(self) -> None:
        """From then on a signal ends the process at once; soon after a second one it ends there.

        Soon after the first it ends there if threads are left.
        """
        # Before threads are waited for: `atexit` comes after that.
        threading._register_atexit(self._python_ends)  # type: ignore[attr-defined]

    def _python_ends(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_DFL)
        if time.monotonic() - self.second_at < _SOON:
            self._say(ending.END_NOW)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            time.sleep(ending.SECONDS_AFTER_SECOND)  # The thread exits.
        elif time.monotonic() - self.first[1] < _SOON and left_threads.nobody_waits():
            left_threads.exit_without_them(INTERRUPTED)

    def _say(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._pythons, bytes([number]))

    def _exit_when_told(self) -> None:
        if os.read(self._ours, 1):
            os._exit(INTERRUPTED)
        os.close(self._ours)


_ends: list[_End] = []
_hearing: list[int] = []
"""Descriptors that other processes read."""
os.register_at_fork(after_in_child=lambda: _hearing and signal.set_wakeup_fd(-1))
