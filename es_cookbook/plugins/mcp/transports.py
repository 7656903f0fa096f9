"""Transports to MCP servers: a process, or a server over HTTP.

The stdio transport of the `mcp` package is not used: it cannot say how a process has ended, and it
reads a line of any length. Its HTTP transport is.
"""

import contextlib
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

from es_cookbook.common.machine.processes import Process

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_MOST_BYTES = 4 << 20
"""Limit on a process's message, on what it leaves unread, and on a response over HTTP, in bytes."""
_MOST_WAITING = 1024
"""Limit on the messages of a process that are not handled yet."""
_SECONDS_TO_END = 1.0
"""Time to end after its standard input was closed; then the process is killed."""


@contextlib.asynccontextmanager
async def stdio(command: str, ended: Callable[[str], None]) -> "AsyncGenerator[TransportStreams]":
    """Start a server; lines of its standard input and output are messages.

    Args:
        command: the program and its arguments.
        ended: called with how the process has ended, or why it is killed.
    """
    heard, hears = anyio.create_memory_object_stream[SessionMessage | Exception](_MOST_WAITING)
    says, said = anyio.create_memory_object_stream[SessionMessage](0)
    begun = bytearray()

    def hear(piece: bytes) -> bool:
        begun.extend(piece)
        *lines, begun[:] = begun.split(b"\n")
        if max(map(len, (*lines, begun))) > _MOST_BYTES:
            ended(f"sent a message of more than {_MOST_BYTES >> 20} MiB")
            return False
        for line in lines:
            try:
                message = jsonrpc_message_adapter.validate_json(bytes(line), by_name=False)
                if not isinstance(message, JSONRPCNotification):  # Sessions use none of them.
                    heard.send_nowait(SessionMessage(message))
            except ValueError:
                pass  # As a rule a log, which should have gone to standard error.
            except (anyio.WouldBlock, anyio.BrokenResourceError):  # Or the session has ended.
                ended(f"sent more than {_MOST_WAITING:,} messages at once")
                return False
        return True

    async def write() -> None:
        async for each in said:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            if process.write(text.encode() + b"\n") > _MOST_BYTES:
                ended(f"left more than {_MOST_BYTES >> 20} MiB unread")
                process.kill()
                return

    async def watch() -> None:
        await process.wait()
        ended(process.how())
        heard.close()  # So calls in progress end, too.

    process = await Process.start(shlex.split(command), os.environ, hear)
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
async def http(url: str) -> "AsyncGenerator[TransportStreams]":
    """Connect to a server that runs already, without proxies and redirects."""
    headers = {"Accept-Encoding": "identity"}
    async with (
        httpx2.AsyncClient(transport=_Limited(), timeout=None, headers=headers) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class _Limited(httpx2.AsyncHTTPTransport):
    """Limits responses in size and decompresses none.

    The stream of messages that were not requested (GET) is not opened.
    """

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and "last-event-id" not in request.headers:
            return httpx2.Response(405)
        response = await super().handle_async_request(request)
        response.headers.pop("content-encoding", None)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream)
        return response


class _LimitedStream(httpx2.AsyncByteStream):
    """The body of a response, up to `_MOST_BYTES`."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        length = 0
        async for piece in self._stream:
            length += len(piece)
            if length > _MOST_BYTES:
                raise httpx2.StreamError(f"sent more than {_MOST_BYTES >> 20} MiB at once")
            yield piece

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()
