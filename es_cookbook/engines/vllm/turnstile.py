"""Requests that need other weights take turns.

An engine that holds one set of weights at a time can still answer for several: those who need the
set that is there go through together; the others wait until nobody is inside, and then the set that
has been waited for longest comes in. Who is inside only ever waits for the engine, so everybody's
turn comes as long as requests end.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager


class Turnstile:
    """Admits requests by the weights that they need. For the tasks of one event loop.

    Args:
        switch: brings in a set of weights; called when nobody is inside.

    Attributes:
        current: the set that is there, None if none is known to be.
    """

    def __init__(self, switch: Callable[[Hashable], Awaitable[object]]) -> None:
        self.current: Hashable | None = None
        self._switch = switch
        self._num_inside = 0
        self._switching: asyncio.Task[None] | None = None
        self._waiting: dict[Hashable, list[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def using(self, weights: Hashable) -> AsyncGenerator[None]:
        """Inside, these weights are there and stay.

        Raises:
            Exception: What `switch` raised; nobody went in.
        """
        if weights == self.current and self._switching is None:
            self._num_inside += 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(weights, []).append(turn)
            self._next()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave()  # Let in and cancelled in the same turn of the event loop.
                else:
                    self._give_up(weights, turn)
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._num_inside -= 1
        self._next()

    def _give_up(self, weights: Hashable, turn: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(weights, [])
        if turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[weights]

    def _next(self) -> None:
        """Begin to switch to what has been waited for longest, if nobody is inside."""
        if self._waiting and self._num_inside == 0 and self._switching is None:
            self._switching = asyncio.create_task(self._bring_in(next(iter(self._waiting))))

    async def _bring_in(self, weights: Hashable) -> None:
        error: BaseException | None = None
        try:
            if weights != self.current:
                self.current = None
                await self._switch(weights)
                self.current = weights
        except Exception as raised:
            error = raised
        self._switching = None
        for turn in self._waiting.pop(weights, []):
            if turn.done():
                continue
            if error is None:
                self._num_inside += 1
                turn.set_result(None)
            else:
                turn.set_exception(error)
        self._next()
