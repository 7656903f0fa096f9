"""Runs an MCP server as a process, and limits what it sends.

A server may send `MOST_BYTES` when a session begins and as much more for each call, whatever it
sends: results, notifications, requests, logs. A message, which is a line, may have `MOST_BYTES` and
`MOST_VALUES`. A server that goes beyond is cut off.

The stdio transport of the `mcp` package is not used, because it reads without a limit.
"""

import contextlib
import math
import os
import shlex
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import anyio
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCNotification, jsonrpc_message_adapter

from es_cookbook.common.files import num_values
from es_cookbook.common.machine.processes import Process, dying_first

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MOST_BYTES = 4 << 20
"""Limit on a message, and allowance per call."""
MOST_VALUES = 1 << 15
"""JSON values in a message; an object counts as four."""
_MOST_AHEAD = 16 * MOST_BYTES
"""Bytes that a server may have left to send."""
_BYTES_OF_LINE = 1024
"""Added to the bytes of a line, because a short message costs as much to answer as a long one."""
_MOST_UNREAD = 4 * MOST_BYTES
"""Bytes written to a process that it has not read."""
_SECONDS_TO_END = 1.0
"""After its standard input was closed; then the process is killed."""


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
        self._room -= len(piece) + _BYTES_OF_LINE * piece.count(b"\n")
        is_covered = self._room >= 0 and length <= MOST_BYTES
        if not is_covered:
            self.cut_off(f"sent more than {MOST_BYTES >> 20} MiB in a message, or for each call")
        return is_covered


@contextlib.asynccontextmanager
async def stdio(
    command: str, allowance: Allowance, ended: Callable[[str], None]
) -> "AsyncGenerator[TransportStreams]":
    """Start a server; lines of its standard input and output are messages.

    Args:
        command: the program and its arguments.
        allowance: for what it writes.
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
                if num_values(line, MOST_VALUES) > MOST_VALUES:
                    allowance.cut_off(f"sent more than {MOST_VALUES:,} values in a message")
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
