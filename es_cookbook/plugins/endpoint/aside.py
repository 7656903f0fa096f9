"""Long work of requests beside the event loop, which answers others meanwhile.

It is done by one thread, a piece at a time, in the order in which the pieces were asked for: so no
request keeps another one waiting for longer than a piece, and the memory that a piece needs is
needed once. Short work stays on the loop, where it takes less time than going to a thread.
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
    """What a function returns, called in the thread if its work is long.

    Args:
        size: characters or tokens that it works on.
        function: that is called, to its end also where whoever waits for it is cancelled.
        args: that it is given.
    """
    if size <= LONG:
        return function(*args)
    return await to_thread.run_sync(function, *args, limiter=_limiter())


def is_busy() -> bool:
    """Whether there is long work at this moment."""
    return _limiter().borrowed_tokens > 0


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _limiters.get()
    except LookupError:
        _limiters.set(found := anyio.CapacityLimiter(1))
        return found
