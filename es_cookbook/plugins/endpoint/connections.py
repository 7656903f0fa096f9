"""Connections of clients, and what one may cost before it has shown a right key.

uvicorn's HTTP by h11, with limits that uvicorn has not, of time above all. A request without a key
is refused when its head is there, and its body is thrown away unread, so a stranger costs a head of
`MOST_HEAD` bytes at a time. Whoever does not finish a request, or does not read its refusal, is
closed after some seconds; of those that have never shown a right key the oldest is closed when
there are too many. What a key has opened is left alone until its answer is sent, however long that
takes, but for its body, which has to come.

Limits are above what honest programs do: a thousand connections that are opened at once, before any
of them has sent anything, are all answered; and a connection stays open between requests for longer
than programs usually wait, since a request that is sent while it is closed is lost.

Reads are small: many bytes of one client do not hold up the others. It is h11 whether httptools is
installed or not: that one limits no head, and a part of a body costs the same by both.
"""

import asyncio
import contextlib
import dataclasses
import json
import resource
import socket
import weakref
from collections.abc import Callable, Generator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from es_cookbook.plugins.endpoint.requests import RefusedRequest

MOST_BYTES = 8 << 20
"""Of a request's body."""
MOST_HEAD = 16 << 10
"""Bytes of a request's first line and headers; parsing them takes 10 ms at worst."""
MOST_CHUNKS = 8 << 10
"""Of a body: each costs as much as a kilobyte of text, though it may have one byte."""
_READ_OF_HEAD, _READ_OF_BODY = 2 << 10, 16 << 10
"""Bytes at once. A head has some hundred; what comes behind it waits until the key is checked."""
_ACCEPTED_AT_ONCE, _QUEUE = 2, 2048
"""Connections: those accepted before any of them is looked at, and those that the system holds."""
_DESCRIPTORS = 1 << 14
"""Files and connections that the process asks the system for; often it has 1,024."""
_SECONDS_TO_ANSWER = 2
"""For what is under way when the process is told to end: an answer may take minutes."""
_SAID = {
    400: "this is no request of HTTP/1.1",
    408: "the request did not come to its end in time",
    413: f"the body comes in more than {MOST_CHUNKS} chunks",
    431: f"the first line and the headers have more than {MOST_HEAD >> 10} KiB",
    501: "a body comes with its length or in chunks, and in no other encoding",
    505: "HTTP/1.1 is spoken here",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What is granted to connections.

    Attributes:
        head: seconds for a request up to its body, or, without a right key, in which nothing comes.
        body: seconds for a body after its key was found right.
        idle: seconds in which who has shown a right key asks nothing.
        linger: seconds in which a client may read why it is refused.
        strangers: connections that have never shown a right key; fewer, where the process may have
            few descriptors.
    """

    head: float = 8.0
    body: float = 60.0
    idle: float = 75.0
    linger: float = 2.0
    strangers: int = 2048


def key_is_right(scope: Scope) -> None:
    """Tell the connection of this request that its key is right."""
    connection = cast("Mapping[str, Connection]", scope.get("state", {})).get("connection")
    if connection is not None:
        with contextlib.suppress(ReferenceError):  # It is lost.
            connection.key_is_right()


class _Crowd:
    """What the connections of a server share."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._most = min(limits.strangers, _descriptors() // 4)
        self.buffer = memoryview(bytearray(_READ_OF_BODY))
        self._strangers: dict[Connection, None] = {}

    def enter(self, connection: "Connection") -> None:
        self._strangers[connection] = None
        if len(self._strangers) > self._most:
            oldest = next(iter(self._strangers))
            self.leave(oldest)
            oldest.transport.abort()

    def leave(self, connection: "Connection") -> None:
        self._strangers.pop(connection, None)


def _descriptors() -> int:
    """How many the process may have, after it has asked for more if it has few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # Of some systems the limit is lower still.
        return soft
    return wanted


class _Reader(h11.Connection):
    """Refuses what h11 bears.

    Attributes:
        status: of the refusal.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD)
        self.status = 400
        self._num_chunks = 0

    @override
    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._num_chunks = 0
                if event.http_version not in (b"1.0", b"1.1"):
                    raise h11.RemoteProtocolError("version", error_status_hint=505)
                names = [name for name, _ in event.headers]
                if b"transfer-encoding" in names and b"content-length" in names:
                    # Two programs would disagree about where it ends.
                    raise h11.RemoteProtocolError("a length and an encoding")
            elif isinstance(event, h11.Data) and event.chunk_start:
                self._num_chunks += 1
                if self._num_chunks > MOST_CHUNKS:
                    raise h11.RemoteProtocolError("chunks", error_status_hint=413)
            return event
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise

    @override
    def send(self, event: Any) -> Any:
        sent = super().send(event)
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            # Told by h11, uvicorn would close at once, and a client that is sending see no answer.
            return bytes(sent).removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"
        return sent


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """One of a client."""

    conn: _Reader

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        crowd: _Crowd,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Reader()
        self.app_state = {"connection": weakref.proxy(self)}
        self._crowd = crowd
        self._timer: asyncio.TimerHandle | None = None
        self._is_known = self._is_opened = self._is_refused = False
        self._left = MOST_BYTES
        self._body_until = 0.0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._within(self._crowd.limits.head, self._late)
        self._crowd.enter(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._crowd.leave(self)
        self._within(None)

    def key_is_right(self) -> None:
        """The request under way may be answered."""
        self._crowd.leave(self)
        self._is_known = self._is_opened = True
        self._body_until = self.loop.time() + self._crowd.limits.body
        self._wait_for_body()

    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        is_head = self.conn.their_state is h11.IDLE
        return self._crowd.buffer[: _READ_OF_HEAD if is_head else _READ_OF_BODY]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._crowd.buffer[:nbytes]))

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._left -= len(data)
            if self._left < 0:
                self.transport.abort()
            return
        was_idle = self.conn.their_state is h11.IDLE
        super().data_received(data)
        if self._is_refused:
            return
        if self._is_opened:
            self._wait_for_body()
        elif was_idle and self.conn.their_state is not h11.IDLE:
            # The program may have been busy since it came.
            self._within(self._crowd.limits.head, self._late)

    @override
    def on_response_complete(self) -> None:
        self._is_opened = False
        if self.conn.their_state is h11.SEND_BODY:
            self._hang_up()
            return
        limits = self._crowd.limits
        self._within(limits.idle if self._is_known else limits.head, self._late)
        super().on_response_complete()
        self._unset_keepalive_if_required()  # A reset connection would leave it behind.

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.status)

    def _wait_for_body(self) -> None:
        """Have the rest of a body come, if there is any."""
        left = min(self._crowd.limits.head, self._body_until - self.loop.time())
        self._within(left if self.conn.their_state is h11.SEND_BODY else None, self._late)

    def _late(self) -> None:
        is_begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if is_begun or (self._is_opened and self.conn.their_state is h11.SEND_BODY):
            self._refuse(408)
        elif self._is_known:
            self.transport.close()  # Its last answer may still be on its way.
        else:
            self.transport.abort()

    def _refuse(self, status: int) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(RefusedRequest(_SAID[status], status=status).body)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write((head + body).encode())
        self._hang_up()

    def _hang_up(self) -> None:
        """Send nothing more, and throw away what comes.

        Closed at once, a client that is still sending would find the connection reset.
        """
        self._is_refused = True
        # h11_impl sets it only for connections that have had a request.
        cycle = cast("Any", self.cycle)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        with contextlib.suppress(OSError):  # The client may be gone.
            self.transport.write_eof()
        self.flow.resume_reading()
        self._within(self._crowd.limits.linger, self.transport.abort)

    def _within(self, seconds: float | None, do: Callable[[], None] | None = None) -> None:
        """Do that after so many seconds, and what was to be done before no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and do is not None:
            self._timer = self.loop.call_later(seconds, do)


class _Server(uvicorn.Server):
    """One that may leave the process's signals to others."""

    def __init__(self, config: uvicorn.Config, *, leaves_signals: bool) -> None:
        super().__init__(config)
        self._leaves_signals = leaves_signals

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        with contextlib.nullcontext() if self._leaves_signals else super().capture_signals():
            yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_QUEUE)


async def serve_at(
    bound: socket.socket, application: ASGIApp, limits: ConnectionLimits, *, until_told: bool
) -> None:
    """Answer at this socket until the process is told to end, or else until cancelled."""
    options = uvicorn.Config(
        application,
        http=cast("Any", partial(Connection, crowd=_Crowd(limits))),
        ws="none",
        log_level="error",  # A stranger's rubbish is worth no line each.
        access_log=False,
        lifespan="off",
        backlog=_ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=_SECONDS_TO_ANSWER,
    )
    # asyncio sets it for sockets that were made with the protocol's number, which most are not. A
    # response of two writes waits 40 ms without.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(options, leaves_signals=not until_told)
    try:
        await server.serve([bound])
    finally:  # Cancelled, it leaves the event loop listening at a socket that is closed then.
        for listening in getattr(server, "servers", ()):
            listening.close()
