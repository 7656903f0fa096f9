"""The server of the endpoint and of reports: uvicorn, with limits on requests that do not end.

uvicorn limits neither the time of a request's head nor the bytes of one read. A head gets
`HEAD_SECONDS` and `_MOST_HEAD` bytes here, and reads are small, so that many small chunks of one
client do not delay the others. The application limits bodies (`app`).
"""

import asyncio
import contextlib
import resource
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 6.0
"""Time for a request's first line and headers."""
_MOST_HEAD = 16 << 10
"""Limit on their bytes; parsing takes 10 ms at worst."""
_READ = 16 << 10
"""Bytes of one read."""
_ACCEPTED_AT_ONCE = 2
"""Connections accepted before the event loop does anything else: a burst must not delay others."""
_QUEUE = 2048
"""Connections that the system holds until they are accepted."""
_IDLE_SECONDS = 75
"""Time between two requests of a connection: longer than programs usually wait."""
_SECONDS_TO_ANSWER = 2
"""Time for requests in progress at shutdown: an answer may take minutes."""
_DESCRIPTORS = 1 << 14
"""Files and connections of this process; the usual limit is 1,024."""


class _Protocol(H11Protocol, asyncio.BufferedProtocol):
    """A connection."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self._buffer = bytearray(_READ)
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._time_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    @override
    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    @override
    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # A reply has begun, or may have no body.
            self.transport.abort()

    def _time_head(self) -> None:
        """Limit the time of a head that has begun."""
        in_head = self.conn.their_state is h11.IDLE
        if in_head and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not in_head and self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """A server that accepts few connections at once, and may leave signals to others."""

    def __init__(self, config: uvicorn.Config, *, leaves_signals: bool) -> None:
        super().__init__(config)
        self._leaves_signals = leaves_signals

    @override
    def capture_signals(self) -> Any:
        return contextlib.nullcontext() if self._leaves_signals else super().capture_signals()

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_QUEUE)  # asyncio takes one number for both.


async def serve_at(bound: socket.socket, application: ASGIApp, *, until_signal: bool) -> None:
    """Answer at this socket until SIGTERM or Ctrl-C, or else until cancelled."""
    options = uvicorn.Config(
        application,
        http=_Protocol,
        ws="none",
        log_level="error",  # Malformed requests are not worth a line each.
        access_log=False,
        lifespan="off",
        backlog=_ACCEPTED_AT_ONCE,
        h11_max_incomplete_event_size=_MOST_HEAD,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_SECONDS_TO_ANSWER,
    )
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _DESCRIPTORS:
        with contextlib.suppress(OSError, ValueError):  # Some systems have a lower limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, most))
    # asyncio sets it only for sockets that were made with the protocol's number. Without it, a
    # response of two writes waits 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(options, leaves_signals=not until_signal)
    try:
        await server.serve([bound])
    finally:  # Cancelled, it leaves the event loop listening at a socket that is closed then.
        for listening in getattr(server, "servers", ()):
            listening.close()
