"""Transports to MCP servers, which limit what a server sends.

A server may send `MOST_BYTES` when a session begins and as much more for each call, whatever it
sends: results, notifications, requests, logs. A message (a line of a process, a response over HTTP)
may have `MOST_BYTES` and `MOST_VALUES`. A server that goes beyond is cut off.

The stdio transport of the `mcp` package is not used, because it reads without a limit. Its HTTP
transport is, with a client that counts.
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

from es_cookbook.common.files import num_values
from es_cookbook.common.machine.processes import Process, dying_first

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MOST_BYTES = 4 << 20
"""Limit on a message, and allowance per call."""
MOST_VALUES = 1 << 15
"""JSON values in a message; an object counts as four."""
_MOST_AHEAD = 16 * MOST_BYTES
"""Limit on the unused allowance of a server, in bytes."""
_BYTES_OF_LINE = 1024
"""Added to the bytes of a line, because a short message costs as much to answer as a long one."""
_MOST_UNREAD = 4 * MOST_BYTES
"""Bytes written to a process that it has not read."""
_SECONDS_TO_END = 1.0
"""Time to end after its standard input was closed; then the process is killed."""
_SECONDS_TO_RESUME = 1.0
"""Pause before a response over HTTP that broke off is requested again."""


class Allowance:
    """The number of bytes that a server may still send.

    Args:
        cut_off: called with the reason when the server has sent too much.
    """

    def __init__(self, cut_off: Callable[[str], None]) -> None:
        self.cut_off = cut_off
        self._room = MOST_BYTES

    def grow(self) -> None:
        """Add the allowance of a call."""
        self._room = min(self._room + MOST_BYTES, _MOST_AHEAD)

    def covers(self, piece: bytes, length: int) -> bool:
        """Count bytes that were received; returns whether the server may go on.

        Args:
            piece: the bytes.
            length: bytes of the message so far.
        """
        num_lines = piece.count(b"\n") + piece.count(b"\r")
        self._room -= len(piece) + _BYTES_OF_LINE * num_lines
        is_covered = self._room >= 0 and length <= MOST_BYTES
        if not is_covered:
            self.cut_off(f"sent more than {MOST_BYTES >> 20} MiB in a message, or for each call")
        return is_covered

    def covers_values(self, values: int) -> bool:
        """Whether a message may have so many values."""
        if values > MOST_VALUES:
            self.cut_off(f"sent more than {MOST_VALUES:,} values in a message")
        return values <= MOST_VALUES


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
    heard, hears = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    says, said = anyio.create_memory_object_stream[SessionMessage](0)
    # The allowance limits its length, since a line counts as a kilobyte at least.
    lines_in, lines = anyio.create_memory_object_stream[bytes](math.inf)
    begun = bytearray()

    def hear(piece: bytes) -> bool:
        begun.extend(piece)
        if b"\n" in piece:
            *whole, rest = begun.split(b"\n")
            begun[:] = rest
            for line in whole:
                lines_in.send_nowait(bytes(line))
        return allowance.covers(piece, len(begun))

    def hear_error(piece: bytes) -> bool:
        return allowance.covers(piece, 0)

    async def read() -> None:
        async with heard:
            async for line in lines:
                if not allowance.covers_values(num_values(line, MOST_VALUES)):
                    process.kill()
                    return
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    continue  # As a rule a log, which should have gone to standard error.
                if not isinstance(message, JSONRPCNotification):  # Sessions use none of them.
                    await heard.send(SessionMessage(message))

    async def write() -> None:
        async for each in said:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            if process.write(text.encode() + b"\n") > _MOST_UNREAD:
                allowance.cut_off(f"left more than {_MOST_UNREAD >> 20} MiB unread")
                process.kill()
                return

    async def watch() -> None:
        await process.wait()
        ended(process.how())
        lines_in.close()  # So calls that are under way end, too.

    words = [*dying_first(), *shlex.split(command)]
    process = await Process.start(words, os.environ, hear, hear_error)
    try:
        async with anyio.create_task_group() as tasks:
            for each in (read, write, watch):
                tasks.start_soon(each)
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
    """Counts bytes of responses, decompresses none, and resumes one only after a pause.

    The stream of messages that were not requested (GET) is not opened.
    """

    def __init__(self, allowance: Allowance) -> None:
        super().__init__()
        self._allowance = allowance

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            if "last-event-id" not in request.headers:
                return httpx2.Response(405)
            await anyio.sleep(_SECONDS_TO_RESUME)
        response = await super().handle_async_request(request)
        response.headers.pop("content-encoding", None)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Counted(response.stream, self._allowance)
        return response


class _Counted(httpx2.AsyncByteStream):
    """The body of a response, line by line: no string of JSON goes beyond the end of a line."""

    def __init__(self, stream: httpx2.AsyncByteStream, allowance: Allowance) -> None:
        self._stream, self._allowance = stream, allowance

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        length = values = 0
        begun = bytearray()
        async for piece in self._stream:
            length += len(piece)
            begun += piece
            _check(self._allowance.covers(piece, length))
            if end := max(begun.rfind(b"\n"), begun.rfind(b"\r")) + 1:
                lines = bytes(begun[:end])
                del begun[:end]
                values += num_values(lines, MOST_VALUES)
                _check(self._allowance.covers_values(values))
                yield lines
        values += num_values(bytes(begun), MOST_VALUES)
        _check(self._allowance.covers_values(values))
        yield bytes(begun)

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()


def _check(is_covered: bool) -> None:
    if not is_covered:
        raise httpx2.StreamError("the server sent too much")
