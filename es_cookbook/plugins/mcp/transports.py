"""Transports to MCP servers, which limit what a server sends.

A server may send `MOST_BYTES` when a session begins and for each call in progress, whatever it
sends: results, notifications, requests, logs. A server that sends more is cut off.

The stdio transport of the `mcp` package is not used: it cannot say how a process has ended. Its
HTTP transport is, with a client that counts.
"""

import contextlib
import math
import os
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification, jsonrpc_message_adapter
from typing_extensions import override

from es_cookbook.common.machine.processes import Process, dying_first

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MOST_BYTES = 4 << 20
"""Allowance per call."""
_SECONDS_TO_END = 1.0
"""Time to end after its standard input was closed; then the process is killed."""


class Allowance:
    """The number of bytes that a server may still send.

    Args:
        cut_off: called with the reason when the server has sent too much.
    """

    def __init__(self, cut_off: Callable[[str], None]) -> None:
        self._cut_off = cut_off
        self._room = MOST_BYTES

    def renew(self, num_calls: int) -> None:
        """Begin again, with the allowance of so many calls."""
        self._room = MOST_BYTES * num_calls

    def covers(self, piece: bytes) -> bool:
        """Count bytes that were received; returns whether the server may go on."""
        self._room -= len(piece)
        if self._room < 0:
            self._cut_off(f"sent more than {MOST_BYTES >> 20} MiB for each call")
        return self._room >= 0


@contextlib.asynccontextmanager
async def stdio(
    command: str, allowance: Allowance, ended: Callable[[str], None]
) -> "AsyncGenerator[TransportStreams]":
    """Start a server; lines of its standard input and output are messages.

    Args:
        command: the program and its arguments.
        allowance: allowance for its output.
        ended: called with how the process has ended.
    """
    heard, hears = anyio.create_memory_object_stream[SessionMessage | Exception](math.inf)
    says, said = anyio.create_memory_object_stream[SessionMessage](0)
    begun = bytearray()

    def hear(piece: bytes) -> bool:
        begun.extend(piece)
        *lines, begun[:] = begun.split(b"\n")
        for line in lines:
            try:
                message = jsonrpc_message_adapter.validate_json(bytes(line), by_name=False)
            except ValueError:
                continue  # As a rule a log, which should have gone to standard error.
            if not isinstance(message, JSONRPCNotification):  # Sessions use none of them.
                heard.send_nowait(SessionMessage(message))
        return allowance.covers(piece)

    async def write() -> None:
        async for each in said:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.write(text.encode() + b"\n")

    async def watch() -> None:
        await process.wait()
        ended(process.how())
        heard.close()  # So calls in progress end, too.

    words = [*dying_first(), *shlex.split(command)]
    process = await Process.start(words, os.environ, hear, allowance.covers)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            tasks.start_soon(watch)
            yield hears, says
            process.write(b"", close=True)
            with anyio.move_on_after(_SECONDS_TO_END):
                await process.exited()
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await process.end()


@contextlib.asynccontextmanager
async def http(url: str, allowance: Allowance) -> "AsyncGenerator[TransportStreams]":
    """Connect to a server that runs already, without proxies and redirects."""
    headers = {"Accept-Encoding": "identity"}
    transport = _Counting(allowance)
    async with (
        httpx2.AsyncClient(transport=transport, timeout=None, headers=headers) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class _Counting(httpx2.AsyncHTTPTransport):
    """Counts the bytes of responses."""

    def __init__(self, allowance: Allowance) -> None:
        super().__init__()
        self._allowance = allowance

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Counted(response.stream, self._allowance)
        return response


class _Counted(httpx2.AsyncByteStream):
    """The body of a response."""

    def __init__(self, stream: httpx2.AsyncByteStream, allowance: Allowance) -> None:
        self._stream, self._allowance = stream, allowance

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            if not self._allowance.covers(piece):
                raise httpx2.StreamError("the server sent too much")
            yield piece

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()
