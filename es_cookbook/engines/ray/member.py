"""One engine of a pool, as the pool sees it: always where the pool is, whatever becomes of it.

A rollout is a function of (centre, genome, prompt, sampling seed), and all four are known here: so
an engine whose process dies, hangs or fails is replaced by a new one that is brought to the same
place. It is restored from the pool's steps, its fingerprint is compared, its genomes are loaded
again, and what was not answered is asked again (`_Mailbox`). Who asked notices nothing but the
time it takes. An engine that cannot be brought back is lost: whoever used it gets an
`EngineLostError`, and goes to another.

A process may die or hang for any reason, and is replaced `max_restarts` times within a generation.
What an engine says itself about why it failed is a reason: if it says the same again after it was
replaced, within the generation, it would do so for ever, and it is lost at once. So is every other
engine of the pool that says it.

Each machine chooses the dtype of matrix products that is fastest there. In a pool the first engine
that is built chooses for all, and one that chose otherwise at the same time is built again.
"""

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

import chz

from es_cookbook.common.errors import ConfigError, EngineError, ESCookbookError, with_notes
from es_cookbook.common.spans import NO_SPANS, Spans
from es_cookbook.engines.base import EngineBuilder, EngineTraits
from es_cookbook.engines.ray.actor import Built
from es_cookbook.engines.ray.cluster import Actor, ActorLostError, Cluster, Place
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.wire import Answer, Request, decode_answers, encode_requests
from es_cookbook.rl.types import Action

if TYPE_CHECKING:
    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder

_logger = logging.getLogger(__name__)
_COUNTERS = ("restarted", "requests", "tokens", "sent_bytes", "question_bytes")
_OF_ENGINES = ("prefilled_tokens", "cached_tokens")
"""Counters of an engine's own, from the start of its process."""


_Fetched: TypeAlias = tuple[bytes, Mapping[str, float]]


class EngineLostError(EngineError):
    """An engine that cannot be brought back; others of its pool may take its place."""


class DisagreementError(EngineError):
    """An engine whose centre is not the pool's, even after it was restored."""

    @classmethod
    def of(cls, number: int, found: int, expected: int) -> "DisagreementError":
        """Names the engine and both fingerprints."""
        return cls(
            f"engine {number} of the pool was restored from the base model and all steps, and its "
            f"centre has fingerprint {found:016x} where the others have {expected:016x}; engines "
            "of one pool need the same model files and the same version of es_cookbook"
        )


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """A request, who waits for its answer, and its number while it is with the engine."""

    request: Request
    answer: "asyncio.Future[Action | list[float]]"
    number: int | None = None


class _Mailbox:
    """The requests of one engine on their way to its process, and answers on their way back.

    Requests that are made in one turn of the event loop go in one call, and answers come back as
    many at a time as there are. When the process fails, what was not answered returns to the outbox
    and is sent again to the next one. For the tasks of one event loop.

    Args:
        counters: of the pool, by the names of its stats.
        timeout: seconds without any answer, while there are requests, after which a process hangs.
        on_failure: called when the process dies, hangs or cannot answer; nothing is sent any more
            until `open`.
    """

    def __init__(
        self, counters: dict[str, float], timeout: float, on_failure: Callable[[EngineError], None]
    ) -> None:
        self._counters = counters
        self._timeout = timeout
        self._on_failure = on_failure
        self._actor: Actor | None = None
        self._counted: Mapping[str, float] = {}
        self._is_paused = False
        self._refusing: EngineError | None = None
        self._outbox: dict[_Pending, None] = {}
        self._sent: dict[int, _Pending] = {}
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

    def open(self, actor: Actor) -> None:
        """Send to this process from now on."""
        self._actor, self._counted = actor, {}
        self._flush_soon()

    async def pause(self) -> None:
        """Send nothing more, and wait until nothing is with the engine."""
        self._is_paused = True
        await self._nothing_sent.wait()

    def resume(self) -> None:
        """Send again."""
        self._is_paused = False
        self._flush_soon()

    def refuse(self, future: EngineError, waiting: EngineError) -> None:
        """Raise one error in all future requests, another in those that wait."""
        self._refusing = future
        for pending in self._take_back():
            if not pending.answer.done():
                pending.answer.set_exception(waiting)

    async def close(self) -> None:
        """Stop listening."""
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
        self._counters["sent_bytes"] += sum(map(len, batch))
        self._counters["question_bytes"] += len(batch[0])
        self._actor.send("submit", first, *batch)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen(self._actor))

    async def _listen(self, actor: Actor) -> None:
        """Take answers until all are there."""
        try:
            while self._sent:
                data, counted = cast(_Fetched, await actor.call("fetch", timeout=None))
                for name in filter(counted.__contains__, _OF_ENGINES):
                    more = counted[name] - self._counted.get(name, 0)
                    self._counters[name] = self._counters.get(name, 0) + more
                self._counted = counted
                self._take(actor, decode_answers(data))
        except EngineError as error:
            self._fail(actor, error)

    def _take(self, actor: Actor, answers: Iterable[tuple[int, Answer]]) -> None:
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
            self._counters["requests"] += 1
            if isinstance(answer, Exception):
                pending.answer.set_exception(answer)
            else:
                if isinstance(answer, Action):
                    self._counters["tokens"] += len(answer.tokens_T)
                pending.answer.set_result(answer)
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

    def _take_back(self) -> list[_Pending]:
        """Have no process any more. Returns what is not answered."""
        self._actor = None
        unanswered = [*self._sent.values(), *self._outbox]
        for pending in unanswered:
            pending.number = None
        self._outbox = {}
        self._sent.clear()
        self._cancelled.clear()
        self._expect_answers()
        return unanswered


@dataclasses.dataclass(slots=True)
class Ledger:
    """How the engines of a pool are made, where all of them should be, and what they did together.

    Attributes:
        max_restarts: and the rest up to `start_timeout` are as in `RayPoolBuilder`;
            `request_timeout` is for loading genomes and taking a step, too, `start_timeout` for
            saving.
        first: traits of the engine that was built first.
        steps: from the base to now, as bytes.
        snapshot: path of a centre on their way, for engines that can read it.
        fingerprints: that they give: after so many steps -> fingerprint, as far as it is known.
        recurring: reasons for failing, in this generation, that came again after a restart.
        counters: engines `restarted`, `requests` answered and `tokens` sampled; `sent_bytes`
            without Ray's own envelopes, and of these `question_bytes`: prompts, how to sample them,
            and seeds; of engines that count them, prompt tokens as in `TorchEngine.stats`.
        spans: takes when each of them took a step.
    """

    builder: EngineBuilder
    model_name: str
    search_space: "SearchSpaceBuilder"
    cluster: Cluster
    max_restarts: int
    request_timeout: float
    start_timeout: float
    first: EngineTraits | None = None
    steps: list[bytes] = dataclasses.field(default_factory=list[bytes])
    snapshot: str | None = None
    fingerprints: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    recurring: set[str] = dataclasses.field(default_factory=set[str])
    counters: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(_COUNTERS, 0)
    )
    spans: Spans = NO_SPANS

    def products_for(self, traits: EngineTraits) -> str | None:
        """Dtype of products that an engine is to have: that of the first, now or before."""
        if self.first is None:
            self.first = traits
            if traits.products is not None and isinstance(self.builder, TorchEngineBuilder):
                # Whoever is built from now on, on whatever machine, is told.
                self.builder = chz.replace(self.builder, products=traits.products)
        return self.first.products


class Member:
    """One engine of a pool; `on_loss` is called once if it is lost.

    Attributes:
        built: what is constant of its engine, `pid` of the process and `node`, the machine's name,
            once it has started.
        mailbox: takes requests.
        lost: why it is lost or closed, or None.
    """

    built: Built
    pid: int
    node: str

    def __init__(
        self,
        number: int,
        place: Place,
        ledger: Ledger,
        on_loss: "Callable[[Member], None]",
    ) -> None:
        self.number = number
        self.place = place
        self.mailbox = _Mailbox(ledger.counters, ledger.request_timeout, self._repair_soon)
        self.lost: EngineError | None = None
        self._ledger = ledger
        self._on_loss = on_loss
        self._actor: Actor | None = None
        self._broken: EngineError | None = None
        self._restarts_left = ledger.max_restarts
        self._reasons: set[str] = set()
        self._position = 0
        self._until: int | None = None
        """Steps that it is to have taken; None: all, of one that starts."""
        self._fingerprint = 0
        self._genomes: bytes | None = None
        self._lock = asyncio.Lock()
        self._repairing: asyncio.Task[None] | None = None

    @property
    def label(self) -> str:
        """What it is called in a profile."""
        return f"engine {self.number}"

    async def start(self) -> int:
        """Start it and bring it to the pool's centre. Returns the fingerprint.

        Raises:
            ESCookbookError: It cannot be built, restored or reached.
        """
        async with self._changing():
            await self._start()
            return self._fingerprint

    async def load(self, genomes: bytes) -> None:
        """Make genomes resident.

        Raises:
            EngineLostError: It is lost.
        """
        async with self._recovering():
            self._genomes = genomes
            if self._broken is None:
                await self._call("load", genomes)

    async def catch_up(self, until: int | None = None) -> int:
        """Take the steps that the pool has and this engine has not. Returns the fingerprint.

        Args:
            until: be where the pool was after so many steps, also from beyond; None: all.

        Raises:
            EngineLostError: It is lost.
        """
        self._until = len(self._ledger.steps) if until is None else until
        if self._broken is None and self._position == self._wanted:
            return self._fingerprint
        async with self._recovering():
            began = time.perf_counter()
            self._genomes = None
            self._restarts_left = self._ledger.max_restarts
            self._reasons.clear()
            if self._broken is None and self._position > self._wanted:
                await self._restore()
            while self._broken is None and self._position < self._wanted:
                step = self._ledger.steps[self._position]
                self._fingerprint = cast(int, await self._call("apply", step))
                self._position += 1
            self._ledger.spans.add(self.label, "apply", began, time.perf_counter())
        return self._fingerprint

    async def restore(self, until: int | None = None, *, from_base: bool = False) -> int:
        """Set the centre to the base moved by the pool's steps. Returns the fingerprint.

        Args:
            until: the first so many; None: all.
            from_base: take no snapshot, which here may be another file than elsewhere.

        Raises:
            EngineLostError: It is lost.
        """
        self._until = len(self._ledger.steps) if until is None else until
        async with self._recovering():
            self._genomes = None
            if self._broken is None:
                await self._restore(from_base=from_base)
        return self._fingerprint

    @property
    def _wanted(self) -> int:
        """Steps that it is to have taken."""
        return len(self._ledger.steps) if self._until is None else self._until

    async def save(self, path: str) -> None:
        async with self._changing():
            await self._revive()
            await self._call("save", path)

    async def close(self) -> None:
        """End the process; requests in flight fail."""
        self.lost = self.lost or EngineError("the engine is closed")
        in_flight = EngineError("the engine was closed while this request was in flight")
        self.mailbox.refuse(self.lost, in_flight)
        await self.mailbox.close()
        if self._repairing is not None:
            self._repairing.cancel()
            await asyncio.gather(self._repairing, return_exceptions=True)
        if self._actor is not None:
            actor, self._actor = self._actor, None
            await actor.close()

    def _repair_soon(self, error: EngineError) -> None:
        self._broken = error
        self._repairing = asyncio.create_task(self._repair())

    async def _repair(self) -> None:
        with suppress(EngineError):  # Whoever waits for an answer is told.
            async with self._recovering():
                pass

    @asynccontextmanager
    async def _changing(self) -> AsyncGenerator[None]:
        """Inside, no request is with the engine, and no other change is made."""
        async with self._lock:
            try:
                await self.mailbox.pause()
                if self.lost is not None:
                    raise self.lost
                yield
            finally:
                self.mailbox.resume()

    @asynccontextmanager
    async def _recovering(self) -> AsyncGenerator[None]:
        """As `_changing`; an engine that is broken, or breaks inside, is replaced at the end."""
        async with self._changing():
            try:
                yield
            except EngineError as error:
                self._broken = error
            await self._revive()

    async def _revive(self) -> None:
        """Put a new engine in the place of a broken one.

        Raises:
            EngineLostError: None comes up.
            DisagreementError: It is not where the pool is.
        """
        restarts = self._ledger.max_restarts
        while self._broken is not None:
            if self._recurs(self._broken):
                self._lose(f"{self._broken} (a restart did not help)")
            if self._restarts_left == 0:
                self._lose(f"{self._broken} (engine.max_restarts={restarts})")
            self._restarts_left -= 1
            self._ledger.counters["restarted"] += 1
            _logger.warning(
                "engine %d of the pool (process %d on %s) is started again (%d of %d): %s",
                *(self.number, self.pid, self.node),
                *(restarts - self._restarts_left, restarts, self._broken),
            )
            try:
                await self._start()
                self._broken = None
            except DisagreementError as error:
                self._lose(error)
            except EngineError as error:
                self._broken = error
            except ESCookbookError as error:
                self._lose(str(error))

    def _recurs(self, failure: EngineError) -> bool:
        """Whether an engine gives this reason again; numbers in it may differ."""
        if isinstance(failure, ActorLostError):
            return False
        reason = re.sub(r"\d+", "", str(failure))
        if reason in self._reasons:
            self._ledger.recurring.add(reason)
        self._reasons.add(reason)
        return reason in self._ledger.recurring

    def _lose(self, why: str | DisagreementError) -> NoReturn:
        lost = f"engine {self.number} of the pool is lost: {why}"
        reason = EngineLostError(lost) if isinstance(why, str) else why
        self.lost = reason = with_notes(reason, self._broken)
        self.mailbox.refuse(reason, reason)
        if self._actor is not None:
            self._actor.kill()
            self._actor = None
        self._on_loss(self)
        raise reason

    async def _start(self) -> None:
        """Start a process, in place of any before, and bring it to where the pool is."""
        await self.mailbox.close()
        await self._build_alike()
        await self._restore()
        if self._disagrees:
            await self._restore(from_base=True)
        if self._disagrees:
            expected = self._ledger.fingerprints[self._position]
            raise DisagreementError.of(self.number, self._fingerprint, expected)
        if self._genomes is not None:
            await self._call("load", self._genomes)
        assert self._actor is not None, "it is built"
        self.mailbox.open(self._actor)

    async def _build_alike(self) -> None:
        """Build an engine that multiplies as the others do; again if it has chosen otherwise.

        Raises:
            ConfigError: It cannot.
        """
        if (differs := await self._build()) and isinstance(
            self._ledger.builder, TorchEngineBuilder
        ):
            _logger.warning("%s; it is built again with theirs", differs)
            differs = await self._build()
        if differs:
            raise ConfigError(f"{differs}; with engine.engine.products=float32 they are alike")

    async def _build(self) -> str | None:
        """Start a process and build an engine. Returns how it differs from others, if it does."""
        ledger = self._ledger
        if self._actor is not None:
            self._actor.kill()
        self._actor = await ledger.cluster.start(self.place)
        recipe = (ledger.builder, ledger.model_name, ledger.search_space)
        started = await self._call("build", *recipe)
        self.built, self.pid, self.node = cast("tuple[Built, int, str]", started)
        traits = self.built[0]
        if (others := ledger.products_for(traits)) == traits.products:
            return None
        own, others = (name or "the dtype of the weights" for name in (traits.products, others))
        return (
            f"engine {self.number} of the pool, on {self.node}, has matrix products in {own}, and "
            f"the others have them in {others}"
        )

    @property
    def _disagrees(self) -> bool:
        expected = self._ledger.fingerprints.get(self._position)
        return expected not in (None, self._fingerprint)

    async def _restore(self, *, from_base: bool = False) -> None:
        steps = self._ledger.steps[: self._wanted]
        snapshot = None if from_base else self._ledger.snapshot
        self._fingerprint = cast(int, await self._call("restore", b"".join(steps), snapshot))
        self._position = len(steps)

    async def _call(self, method: str, *arguments: object) -> object:
        assert self._actor is not None, "it is started before it is used"
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
