"""Requests on their way to one engine's process, and answers on their way back.

Requests that are made in one turn of the event loop go in one call, and answers come back as many
at a time as there are. When the process fails, what was not answered returns to the outbox and is
sent again to the next one.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from typing import cast

from es_cookbook.common.errors import EngineError
from es_cookbook.engines.ray.cluster import Actor, ActorLostError
from es_cookbook.engines.wire import Answer, Request, decode_answers, encode_requests
from es_cookbook.rl.types import Action


@dataclasses.dataclass(slots=True)
class Counters:
    """What happened over all engines of a pool, by the names of `RayPool.stats`.

    Attributes:
        restarted: engines.
        requests: that were answered.
        tokens: that were sampled.
        sent_bytes: to engines, Ray's own envelopes left out.
        question_bytes: of those, prompts with how to sample them and their seeds.
    """

    restarted: int = 0
    requests: int = 0
    tokens: int = 0
    sent_bytes: int = 0
    question_bytes: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Asked:
    """A request, who waits for its answer, and its number while it is with the engine."""

    request: Request
    answer: "asyncio.Future[Action | list[float]]"
    number: int | None = None


class Mailbox:
    """The requests of one engine. For the tasks of one event loop.

    Args:
        counters: of the pool.
        timeout: seconds without any answer, while there are requests, after which a process hangs.
        on_failure: called when the process dies, hangs or cannot answer; nothing is sent any more
            until `open`.
    """

    def __init__(
        self, counters: Counters, timeout: float, on_failure: Callable[[EngineError], None]
    ) -> None:
        self._counters = counters
        self._timeout = timeout
        self._on_failure = on_failure
        self._actor: Actor | None = None
        self._is_paused = False
        self._refusing: EngineError | None = None
        self._outbox: dict[_Asked, None] = {}
        self._sent: dict[int, _Asked] = {}
        self._nothing_sent = asyncio.Event()
        self._nothing_sent.set()
        self._cancelled: list[int] = []
        self._next_number = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def num_unanswered(self) -> int:
        """Requests that wait for their answer."""
        return len(self._sent) + len(self._outbox)

    async def ask(self, request: Request) -> Action | list[float]:
        """Have a request answered, by whichever process that takes.

        Raises:
            EngineError: The mailbox refuses requests.
            RequestError: What the engine said.
        """
        if self._refusing is not None:
            raise self._refusing
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        if not self._outbox:
            self._flush_soon()
        self._outbox[asked] = None
        try:
            return await asked.answer
        except asyncio.CancelledError:
            # Its task was cancelled: so is the request, wherever it is.
            self._outbox.pop(asked, None)
            if asked.number is not None and self._sent.pop(asked.number, None) is not None:
                if not self._cancelled:
                    self._flush_soon()
                self._cancelled.append(asked.number)
                if not self._sent:
                    self._expect_answers()
            raise

    def open(self, actor: Actor) -> None:
        """Send to this process from now on."""
        self._actor = actor
        self._flush_soon()

    async def pause(self) -> None:
        """Send nothing more, and wait until nothing is with the engine."""
        self._is_paused = True
        await self._nothing_sent.wait()

    def resume(self) -> None:
        self._is_paused = False
        self._flush_soon()

    def refuse(self, future: EngineError, waiting: EngineError) -> None:
        """Raise one error in all future requests, another in those that wait."""
        self._refusing = future
        for asked in self._take_back():
            if not asked.answer.done():
                asked.answer.set_exception(waiting)

    async def close(self) -> None:
        self._actor = None
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)

    def _flush_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._actor is None:
            return
        if self._cancelled:
            self._actor.send("cancel", self._cancelled)
            self._cancelled = []
        if not self._outbox or self._is_paused:
            return
        asked, self._outbox = list(self._outbox), {}
        batch, order = encode_requests([one.request for one in asked])
        was_idle = not self._sent
        first = self._next_number
        self._next_number += len(asked)
        for number, i in enumerate(order, first):
            asked[i].number = number
            self._sent[number] = asked[i]
        if was_idle:
            self._expect_answers()
        self._counters.sent_bytes += sum(map(len, batch))
        self._counters.question_bytes += len(batch.samples) + len(batch.scores)
        self._actor.send("submit", first, *batch)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen(self._actor))

    async def _listen(self, actor: Actor) -> None:
        """Take answers until all are there."""
        try:
            while self._sent:
                data = await actor.call("fetch", timeout=None)
                self._take(actor, decode_answers(cast(bytes, data)))
        except EngineError as error:
            self._fail(actor, error)

    def _take(self, actor: Actor, answers: Iterable[tuple[int, Answer]]) -> None:
        failure: EngineError | None = None
        for number, answer in answers:
            asked = self._sent.get(number)
            if asked is None:  # Cancelled meanwhile.
                continue
            if isinstance(answer, EngineError):
                failure = answer
                continue
            del self._sent[number]
            asked.number = None
            if asked.answer.done():  # Cancelled in this turn of the event loop.
                continue
            self._counters.requests += 1
            if isinstance(answer, Exception):
                asked.answer.set_exception(answer)
            else:
                if isinstance(answer, Action):
                    self._counters.tokens += len(answer.tokens_T)
                asked.answer.set_result(answer)
        if failure is not None:
            self._fail(actor, failure)
        self._expect_answers()

    def _expect_answers(self) -> None:
        """Begin to count the seconds without any answer; stop where none is to come."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._sent:
            self._nothing_sent.set()
            return
        self._nothing_sent.clear()
        error = ActorLostError(f"no answer for engine.request_timeout={self._timeout:g} s")
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._timeout, self._fail, self._actor, error)

    def _fail(self, actor: Actor | None, error: EngineError) -> None:
        if actor is not self._actor or actor is None:
            return
        self._outbox = dict.fromkeys(self._take_back())
        self._on_failure(error)

    def _take_back(self) -> list[_Asked]:
        """Have no process any more. Returns what is not answered."""
        self._actor = None
        unanswered = [*self._sent.values(), *self._outbox]
        for asked in unanswered:
            asked.number = None
        self._outbox = {}
        self._sent.clear()
        self._cancelled.clear()
        self._expect_answers()
        return unanswered
