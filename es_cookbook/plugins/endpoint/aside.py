"""Runs long work of requests in one thread, so that the event loop answers others.

The thread does one piece of work at a time, in order of arrival: no request waits for longer than a
piece of another one, and the memory of a piece is needed once. Short work stays on the event loop,
where it takes less time than switching to a thread.
"""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

LONG = 1 << 14
"""Characters or tokens whose reading or writing may take more than a few milliseconds."""
_limiters: RunVar[anyio.CapacityLimiter] = RunVar("work aside")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def aside(size: int, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
    """The result of a function, called in the thread if its work is long.

    Args:
        size: characters or tokens that it works on.
        function: is called to its end even if the caller is cancelled.
        args: its arguments.
    """
    if size <= LONG:
        return function(*args)
    return await to_thread.run_sync(function, *args, limiter=_limiter())


def is_busy() -> bool:
    """Whether the thread is busy."""
    return _limiter().borrowed_tokens > 0


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _limiters.get()
    except LookupError:
        _limiters.set(found := anyio.CapacityLimiter(1))
        return found
