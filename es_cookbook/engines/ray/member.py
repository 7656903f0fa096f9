"""One engine of a pool: a process of the cluster, and the requests on their way to it and back.

A process that dies, hangs or fails is not repaired. Its member is lost: requests raise
`EngineLostError`, and their caller asks another engine. The pool starts a new member in its
place.

Each machine chooses the dtype of matrix products that is fastest there. Engines of one pool must
have the same.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from es_cookbook.common.errors import ConfigError, EngineError
from es_cookbook.common.machine.spans import NO_SPANS, Spans
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.engines.ray.actor import Built
from es_cookbook.engines.ray.cluster import Actor, ActorLostError, Cluster, Place
from es_cookbook.engines.wire import Answer, Request, decode_answers, encode_requests
from es_cookbook.rl.types import Action

if TYPE_CHECKING:
    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder

_COUNTERS = ("restarted", "requests", "tokens", "sent_bytes", "question_bytes")
_OF_ENGINES = ("prefilled_tokens", "cached_tokens")
"""Counters that each engine keeps, from the start of its process."""


_Fetched: TypeAlias = tuple[bytes, Mapping[str, float]]


class EngineLostError(EngineError):
    """An engine that can no longer be used; others of its pool may take its place."""


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """A request, the future of its answer, and its number while the engine has it."""

    request: Request
    answer: "asyncio.Future[Action | list[float]]"
    number: int | None = None


@dataclasses.dataclass(slots=True)
class Ledger:
    """How a pool's engines are made, the centre that all should have, and what they did together.

    Attributes:
        max_restarts: and the rest up to `start_timeout` are as in `RayPoolBuilder`;
            `request_timeout` is also for loading genomes and taking a step, `start_timeout` for
            saving.
        products: dtype of the products of the engine that was built first, once there is one.
        steps: steps from the base to now, as bytes.
        snapshot: path of an earlier centre, for engines that can read it.
        fingerprints: number of steps -> fingerprint after them, where known.
        counters: engines `restarted`, `requests` answered and `tokens` sampled; `sent_bytes`
            without Ray's own envelopes, and of these `question_bytes`: prompts, how to sample them,
            and seeds; of engines that count them, prompt tokens as in `TorchEngine.stats`.
        spans: receives the times at which engines took a step.
    """

    builder: EngineBuilder
    model_name: str
    search_space: "SearchSpaceBuilder"
    cluster: Cluster
    max_restarts: int
    request_timeout: float
    start_timeout: float
    products: str | None = None
    steps: list[bytes] = dataclasses.field(default_factory=list[bytes])
    snapshot: str | None = None
    fingerprints: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    counters: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(_COUNTERS, 0)
    )
    spans: Spans = NO_SPANS


class Member:
    """One engine of a pool; `on_loss` is called once if it is lost.

    Requests that are made in one turn of the event loop go in one call, and answers come back as
    many at a time as there are. For the tasks of one event loop.

    Attributes:
        built: constants of its engine, `pid` of the process and `node`, the machine's name,
            once it has started.
        lost: why it is lost or closed, or None.
    """

    built: Built
    pid: int
    node: str

    def __init__(
        self, number: int, place: Place, ledger: Ledger, on_loss: "Callable[[Member], None]"
    ) -> None:
        self.number, self.place = number, place
        self.lost: EngineError | None = None
        self._ledger, self._on_loss = ledger, on_loss
        self._actor: Actor | None = None
        self._position = self._fingerprint = 0
        self._lock = asyncio.Lock()
        self._counted: Mapping[str, float] = {}
        self._is_paused = False
        self._outbox: dict[_Pending, None] = {}
        self._sent: dict[int, _Pending] = {}
        self._nothing_sent = asyncio.Event()
        self._nothing_sent.set()
        self._cancelled: list[int] = []
        self._next_number = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        """Its name in a profile."""
        return f"engine {self.number}"

    @property
    def num_unanswered(self) -> int:
        """Requests that wait for their answer."""
        return len(self._sent) + len(self._outbox)

    async def start(self) -> None:
        """Start it and bring it to the pool's centre.

        Raises:
            ESCookbookError: It cannot be built, restored or reached.
            ConfigError: Its products have another dtype than those of the others.
        """
        ledger = self._ledger
        self._actor = ledger.cluster.start(self.place)
        recipe = (ledger.builder, ledger.model_name, ledger.search_space)
        started = await self._call("build", *recipe)
        self.built, self.pid, self.node = cast("tuple[Built, int, str]", started)
        products = self.built[0].products or "the dtype of the weights"
        ledger.products = ledger.products or products
        if products != ledger.products:
            raise ConfigError(
                f"engine {self.number} of the pool, on {self.node}, has matrix products in "
                f"{products}, and the others have them in {ledger.products}; set "
                "engine.engine.products=float32"
            )
        await self._restore(len(ledger.steps))

    async def load(self, genomes: bytes) -> None:
        """Make genomes resident.

        Raises:
            EngineLostError: It is lost.
        """
        async with self._changing():
            await self._call("load", genomes)

    async def catch_up(self, until: int | None = None) -> int:
        """Take the pool's steps that this engine lacks. Returns the fingerprint.

        Args:
            until: number of steps, which may be fewer than it has taken; None: all.

        Raises:
            EngineLostError: It is lost.
        """
        wanted = len(self._ledger.steps) if until is None else until
        if self.lost is None and self._position == wanted:
            return self._fingerprint
        async with self._changing():
            began = time.perf_counter()
            if self._position > wanted:
                await self._restore(wanted)
            while self._position < wanted:
                step = self._ledger.steps[self._position]
                self._fingerprint = cast(int, await self._call("apply", step))
                self._position += 1
            self._ledger.spans.add(self.label, "apply", began, time.perf_counter())
        return self._fingerprint

    async def restore(self, until: int | None = None, *, from_base: bool = False) -> int:
        """Set the centre to the base moved by the pool's steps. Returns the fingerprint.

        Args:
            until: number of steps; None: all.
            from_base: take no snapshot, which here may be another file than elsewhere.

        Raises:
            EngineLostError: It is lost.
        """
        async with self._changing():
            wanted = len(self._ledger.steps) if until is None else until
            await self._restore(wanted, from_base=from_base)
        return self._fingerprint

    async def save(self, path: str) -> None:
        """Have the engine write its centre.

        Raises:
            EngineLostError: It is lost.
        """
        async with self._changing():
            await self._call("save", path)

    async def ask(self, request: Request) -> Action | list[float]:
        """Have a request answered.

        Raises:
            EngineError: It is lost or closed.
            RequestError: The engine refuses this request.
        """
        if self.lost is not None:
            raise self.lost
        pending = _Pending(request, asyncio.get_running_loop().create_future())
        if not self._outbox:
            self._flush_soon()
        self._outbox[pending] = None
        try:
            return await pending.answer
        except asyncio.CancelledError:
            # Its task was cancelled: so is the request, wherever it is.
            self._outbox.pop(pending, None)
            if pending.number is not None and self._sent.pop(pending.number, None) is not None:
                if not self._cancelled:
                    self._flush_soon()
                self._cancelled.append(pending.number)
                if not self._sent:
                    self._expect_answers()
            raise

    async def close(self) -> None:
        """End the process; requests in flight fail."""
        self.lost = self.lost or EngineError("the engine is closed")
        self._fail_all(EngineError("the engine was closed while this request was in flight"))
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        if self._actor is not None:
            actor, self._actor = self._actor, None
            await actor.close()

    @asynccontextmanager
    async def _changing(self) -> AsyncGenerator[None]:
        """Hold back requests and other changes inside the block; if it fails, the engine is lost.

        Raises:
            EngineLostError: It is lost.
        """
        async with self._lock:
            try:
                self._is_paused = True
                await self._nothing_sent.wait()
                if self.lost is None:
                    yield
            except EngineError as error:
                self._lose(error)
            finally:
                self._is_paused = False
                self._flush_soon()
            if self.lost is not None:
                raise self.lost

    def _lose(self, why: EngineError) -> None:
        if self.lost is not None:
            return
        self.lost = with_notes(
            EngineLostError(f"engine {self.number} of the pool is lost: {why}"), why
        )
        self._fail_all(self.lost)
        if self._actor is not None:
            self._actor.kill()
            self._actor = None
        self._on_loss(self)

    def _fail_all(self, error: EngineError) -> None:
        """Raise an error in all requests that wait for their answer."""
        for pending in (*self._sent.values(), *self._outbox):
            if not pending.answer.done():
                pending.answer.set_exception(error)
        self._outbox.clear()
        self._sent.clear()
        self._expect_answers()

    def _flush_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send what was asked and cancelled in this turn of the event loop."""
        if self._actor is None:
            return
        if self._cancelled:
            self._actor.send("cancel", self._cancelled)
            self._cancelled = []
        if not self._outbox or self._is_paused:
            return
        pending, self._outbox = list(self._outbox), {}
        batch, order = encode_requests([one.request for one in pending])
        was_idle = not self._sent
        first = self._next_number
        self._next_number += len(pending)
        for number, i in enumerate(order, first):
            pending[i].number = number
            self._sent[number] = pending[i]
        if was_idle:
            self._expect_answers()
        self._ledger.counters["sent_bytes"] += sum(map(len, batch))
        self._ledger.counters["question_bytes"] += len(batch[0])
        self._actor.send("submit", first, *batch)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen(self._actor))

    async def _listen(self, actor: Actor) -> None:
        """Take answers until all are there."""
        counters = self._ledger.counters
        try:
            while self._sent:
                data, counted = cast(_Fetched, await actor.call("fetch", timeout=None))
                for name in filter(counted.__contains__, _OF_ENGINES):
                    more = counted[name] - self._counted.get(name, 0)
                    counters[name] = counters.get(name, 0) + more
                self._counted = counted
                self._take(decode_answers(data))
        except EngineError as error:
            self._lose(error)

    def _take(self, answers: Iterable[tuple[int, Answer]]) -> None:
        failure: EngineError | None = None
        for number, answer in answers:
            pending = self._sent.get(number)
            if pending is None:  # Cancelled meanwhile.
                continue
            if isinstance(answer, EngineError):
                failure = answer
                continue
            del self._sent[number]
            pending.number = None
            if pending.answer.done():  # Cancelled in this turn of the event loop.
                continue
            self._ledger.counters["requests"] += 1
            if isinstance(answer, Exception):
                pending.answer.set_exception(answer)
            else:
                if isinstance(answer, Action):
                    self._ledger.counters["tokens"] += len(answer.tokens_T)
                pending.answer.set_result(answer)
        if failure is not None:
            self._lose(failure)
        self._expect_answers()

    def _expect_answers(self) -> None:
        """Start the timer of seconds without an answer; stop it if no request waits."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._sent:
            self._nothing_sent.set()
            return
        self._nothing_sent.clear()
        seconds = self._ledger.request_timeout
        error = ActorLostError(f"no answer for engine.request_timeout={seconds:g} s")
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._lose, error)

    async def _restore(self, until: int, *, from_base: bool = False) -> None:
        steps = self._ledger.steps[:until]
        snapshot = None if from_base else self._ledger.snapshot
        self._fingerprint = cast(int, await self._call("restore", b"".join(steps), snapshot))
        self._position = len(steps)

    async def _call(self, method: str, *arguments: object) -> object:
        if self._actor is None:
            raise EngineError("the engine is closed")
        sent = sum(len(argument) for argument in arguments if isinstance(argument, bytes))
        self._ledger.counters["sent_bytes"] += sent
        limit = "request_timeout" if method in ("load", "apply") else "start_timeout"
        seconds: float = getattr(self._ledger, limit)
        try:
            return await self._actor.call(method, *arguments, timeout=seconds)
        except TimeoutError:
            raise ActorLostError(
                f"{method!r} took more than engine.{limit}={seconds:g} s"
            ) from None


_Error = TypeVar("_Error", bound=BaseException)


def with_notes(error: _Error, of: BaseException | None) -> _Error:
    """Copy the notes of another error, whose message this error repeats."""
    for note in getattr(of, "__notes__", ()):
        error.add_note(note)
    return error
