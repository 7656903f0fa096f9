"""Threads that a program does not wait for once it has been told to end.

A thread inside a long call (a forward pass, a library that converts or loads a model, a compiler)
cannot be interrupted, and Python waits for it before it exits. Nobody needs its result any more,
and what it writes has a temporary name (`common.files`). So after a signal the event loop closes
without it, and the process exits while it runs.
"""

import atexit
import contextlib
import faulthandler
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TextIO

from typing_extensions import override

from es_cookbook.common.files import remove_unfinished

is_ending = threading.Event()
"""Set when the program has been told to end."""
_PATIENCE = 0.3
"""Seconds that threads have then, to end by themselves."""
_TICK = 0.005
_JUST_NOW = 0.5
_EXIT_SECONDS = 0.5
"""For the functions that are registered with `atexit`."""
_END_SECONDS = 2.0
"""For threads and libraries after a mistake."""
_calls: set["Future[Any]"] = set()
_threads: list[threading.Thread] = []


class LeavableThreads(ThreadPoolExecutor):
    """Threads of an event loop (`asyncio.to_thread`), which closes without those that run then."""

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        call = super().submit(fn, *args, **kwargs)
        _calls.add(call)
        call.add_done_callback(_calls.discard)
        return call

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait and not is_ending.is_set(), cancel_futures=cancel_futures)


async def ended(threads: Sequence[threading.Thread]) -> None:
    """Wait for the end of daemon threads; not for long once the program is to end."""
    import asyncio  # The command line starts without it.

    patience = _PATIENCE
    while any(thread.is_alive() for thread in threads):
        if is_ending.is_set() and (patience := patience - _TICK) < 0:
            _threads.extend(threads)
            return
        await asyncio.sleep(_TICK)


def said_its_last() -> None:
    """An interrupted command is over: if Python ends now, there is nothing to wait for."""
    global _over_at
    _over_at = time.monotonic()


_over_at = -math.inf


def failed() -> None:
    """A command has told of a mistake: if Python ends now, that takes no longer than seconds.

    It waits for threads of the user's code and of libraries, and tears libraries down. Either may
    never come to an end, and the user has read already what to put right. The exit code is 1.
    """
    global _failed_at
    if _failed_at == -math.inf:
        threading._register_atexit(_end_in_time)  # type: ignore[attr-defined]
    _failed_at = time.monotonic()


_failed_at = -math.inf


def _end_in_time() -> None:
    if time.monotonic() - _failed_at < _JUST_NOW:
        # A thread of C, which needs no interpreter.
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=_nowhere())


@functools.cache
def _nowhere() -> TextIO:
    return open(os.devnull, "w")  # For as long as the process lives.


def nobody_waits() -> bool:
    """Whether the process may exit at once: its command is over, or a thread is left."""
    is_over = time.monotonic() - _over_at < _JUST_NOW
    return is_over or bool(_calls) or any(thread.is_alive() for thread in _threads)


def exit_without_them(code: int) -> None:
    """End the process now, as Python would: with what is registered for its end, and flushed.

    Libraries are not torn down, which takes seconds, and crashes where a thread still uses them.
    """
    # Python 3.12.0 to 3.12.2 starts no thread while it shuts down: then what follows has no limit.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_exit_soon, args=(code,), daemon=True).start()
    remove_unfinished()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - Python's own way to run them.
    _exit(code)


def _exit_soon(code: int) -> None:
    time.sleep(_EXIT_SECONDS)
    _exit(code)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
