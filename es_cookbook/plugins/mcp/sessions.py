"""Sessions with MCP servers: opened, asked within a time and a size, and ended.

A session has a task of its own, because rollouts come and go, and any of them may open the one that
all share. After a failure it gets no more calls: it ends when those under way are answered, and the
next call opens another.

A server that is started is a process as a program is (`es_cookbook.plugins.program.processes`), and
speaks over its standard input and output. The library's own transport was left: it reads without a
limit, and its processes survive a run that is killed.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple

import anyio
import httpx2
from anyio.lowlevel import RunVar
from mcp import MCPError
from mcp.client import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    JSONRPCNotification,
    JSONRPCRequest,
    PaginatedRequestParams,
    jsonrpc_message_adapter,
)
from mcp.types import Tool as Described
from pydantic import ValidationError
from typing_extensions import override

from es_cookbook.common.errors import EnvError, leaves
from es_cookbook.common.files import num_values
from es_cookbook.common.terminal import one_line
from es_cookbook.plugins.mcp.servers import MOST_TOOLS, MCPTool, Server, checked_tools, told
from es_cookbook.plugins.program.processes import MARK, Process, end_marked, with_ours
from es_cookbook.rl.messages.tools import Result, cut, failed

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_MOST_BYTES = 4 << 20
"""Of one reply."""
_MOST_VALUES = 2**17
"""JSON values in one reply."""
_MOST_AHEAD = 16 * _MOST_BYTES
"""Bytes that a process may have left to write, of the `_MOST_BYTES` for each request to it."""
_LEAST_COUNTED = 1024
"""Bytes that a message counts as at least: to hold and answer it costs as much."""
_MOST_WAITING = 4 * _MOST_BYTES
"""Bytes that a process may leave unread of what is written to it."""
_SECONDS_TO_RESUME = 1.0
"""Before a response over HTTP that has broken off is asked for again."""
_SECONDS_TO_END = 1.0
"""For a process whose standard input was closed; then it is killed."""

# What it says, with tracebacks, is the reason of a lost rollout.
for _name in ("mcp", "client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class _Opened(NamedTuple):
    """What a session is once it is open."""

    client: ClientSession
    tools: Sequence[MCPTool]


class Session:
    """One session; opened at once, in the background.

    Attributes:
        is_retired: it takes no more calls.
        living: done when it has ended.
        mark: by which its process is known, and what that has started.
    """

    def __init__(self, server: Server) -> None:
        self.is_retired = False
        self.mark = secrets.token_hex(8)
        self._server = server
        self._num_calls = 0
        self._why, self._unread = "", ""
        self._over, self._scope = asyncio.Event(), anyio.CancelScope()
        self._opened: asyncio.Future[_Opened] = asyncio.get_running_loop().create_future()
        self.living = asyncio.create_task(self._live())

    async def tools(self) -> Sequence[MCPTool]:
        """The tools that the server has.

        Raises:
            EnvError: It does not start, is slow, or has tools that cannot be used.
        """
        async with self._in_use() as opened:
            return opened.tools

    async def call(self, tool: MCPTool, arguments: Mapping[str, object]) -> Result:
        """What a call brings, for the model to read.

        Raises:
            EnvError: The server is slow, has ended, or answers with what is no result.
        """
        params = CallToolRequestParams(name=tool.name, arguments=dict(arguments))
        try:
            params.model_dump_json()
        except ValueError:
            return failed(f"{tool.name}: the arguments are nested too deeply, or no text")
        async with self._in_use() as opened:
            if (tool.name, tool.parameters) not in [(t.name, t.parameters) for t in opened.tools]:
                raise EnvError(f"{self._server} no longer has the tool {tool.name!r} as it was")
            request = CallToolRequest(params=params)
            try:
                # Not `call_tool`, which checks results by a schema of the server's.
                found = await opened.client.send_request(request, CallToolResult)
            except MCPError as error:
                if error.code != INVALID_PARAMS:
                    raise
                return failed(cut(error.message, self._server.max_chars))
        return told(found, self._server.max_chars)

    def retire(self) -> None:
        """Take no more calls, and end after those that are under way."""
        self.is_retired = True
        if not self._num_calls:
            self._end()

    def _end(self) -> None:
        if self._opened.done():
            self._over.set()
        else:
            self._scope.cancel()

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncGenerator[_Opened]:
        """Inside, the server is asked something; what goes wrong is an `EnvError`."""
        self._num_calls += 1
        try:
            with anyio.fail_after(self._server.timeout):
                yield await asyncio.shield(self._opened)
        except BaseException as error:
            self.is_retired = True  # Also if the rollout is cancelled: it is still at the call.
            if isinstance(error, TimeoutError):
                why = f"{self._server} did not answer within {self._server.timeout:g} s"
                why += self._unread
            elif isinstance(error, MCPError) and _is_closed(error):
                self._end()
                await asyncio.wait((self.living,))
                why = self._why
            elif isinstance(error, MCPError):
                why = f"{self._server} answered with an error: {one_line(error.message)[:200]}"
                why += self._unread
            elif isinstance(error, ValidationError):
                why = f"{self._server} answered with what is no result of a tool"
            else:
                raise
            raise EnvError(why) from None
        finally:
            self._num_calls -= 1
            if self.is_retired:
                self.retire()

    async def _live(self) -> None:
        try:
            with self._scope:
                async with Client(self._transport(), cache=None) as client:
                    tools: list[MCPTool] = []
                    for tool in checked_tools(self._server, await _all_tools(client.session)):
                        tools.append(tool)
                        await anyio.sleep(0)  # A schema takes a while.
                    self._opened.set_result(_Opened(client.session, tools))
                    await self._over.wait()
                    self._scope.deadline = anyio.current_time() + 2 * _SECONDS_TO_END
        except Exception as error:
            first = next(leaves(error))
            why = one_line(f"{type(first).__name__}: {first}")[:200]
            why = f"cannot be talked to: {why}{self._unread}"
            if isinstance(first, ValidationError):
                why = "answered with what is no list of tools"
            why = str(first) if isinstance(first, EnvError) else f"{self._server} {why}"
            self._why = self._why or why
        finally:
            self.is_retired = True
            self._why = self._why or f"{self._server} has ended"
            if not self._opened.done():
                self._opened.set_exception(EnvError(self._why))
                self._opened.exception()  # Nobody need wait for it.

    def _transport(self) -> "AbstractAsyncContextManager[TransportStreams]":
        def tell(what: str) -> None:
            if "wrote more" not in self._unread:  # A later status is no reason.
                self._unread = what

        return _http(self._server.target, tell) if self._server.is_url else self._process()

    @contextlib.asynccontextmanager
    async def _process(self) -> "AsyncGenerator[TransportStreams]":
        """A process: lines of its standard input and output are messages."""
        heard, hears = anyio.create_memory_object_stream[SessionMessage | Exception](math.inf)
        says, said = anyio.create_memory_object_stream[SessionMessage](0)
        begun, room = b"", _MOST_BYTES

        def hear(piece: bytes) -> bool:
            nonlocal begun, room
            room -= len(piece) + _LEAST_COUNTED * piece.count(b"\n")
            if room < 0 or len(begun) + len(piece) > _MOST_BYTES:
                most = f"{_MOST_BYTES >> 20} MiB in a line, or for each request to it"
                self._why = f"{self._server} wrote more than {most}"
                return False
            *lines, begun = (begun + piece).split(b"\n")
            for line in lines:
                if num_values(line, _MOST_VALUES) > _MOST_VALUES:
                    self._why = f"{self._server} wrote more than {_MOST_VALUES:,} values in a line"
                    return False
                try:
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    self._unread = f", and wrote what is no message: {line[:80]!r}"
                    continue
                if not isinstance(message, JSONRPCNotification):  # Nobody has asked for one.
                    with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                        heard.send_nowait(SessionMessage(message))
            return True

        async def say() -> None:
            nonlocal room
            async for each in said:
                if isinstance(each.message, JSONRPCRequest):  # No reply to a request of its own.
                    room = min(room + _MOST_BYTES, _MOST_AHEAD)
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                if process.write(text.encode() + b"\n") > _MOST_WAITING:
                    most = f"{_MOST_WAITING >> 20} MiB of what was written to it"
                    self._why = f"{self._server} has left more than {most} unread"
                    process.kill()
                    return

        async def watch() -> None:
            await process.wait()
            self._why = self._why or f"{self._server} {process.how()}"
            heard.close()  # So calls that are under way learn of it.
            self._over.set()

        command = shlex.split(self._server.target)
        process = await Process.start(command, with_ours({MARK: self.mark}), hear)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(say)
                tasks.start_soon(watch)
                yield hears, says
                with anyio.move_on_after(_SECONDS_TO_END):
                    process.write(b"", close=True)
                    await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await process.end()


def _is_closed(error: MCPError) -> bool:
    """Whether the library says so: many servers give errors of their own the same code."""
    return error.code == CONNECTION_CLOSED and error.message == "Connection closed"


async def _all_tools(client: ClientSession) -> "list[Described]":
    """All tools, of as many pages as there are; no more than one too many."""
    tools: list[Described] = []
    cursor = None
    while len(tools) <= MOST_TOOLS:
        page = await client.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if not cursor or not page.tools:
            break
    return tools


@contextlib.asynccontextmanager
async def _http(url: str, tell: Callable[[str], None]) -> "AsyncGenerator[TransportStreams]":
    """A server that others have started: by no proxy, and without redirects to elsewhere."""
    headers = {"Accept-Encoding": "identity"}
    async with (
        httpx2.AsyncClient(transport=_Bounded(tell), timeout=None, headers=headers) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    """Reads at most `_MOST_BYTES` of a response, decompresses none, and seldom resumes one.

    The stream of what nobody has asked for is not opened: a server could end it at once, for ever.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    @override
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            if "last-event-id" not in request.headers:
                return httpx2.Response(405)
            await anyio.sleep(_SECONDS_TO_RESUME)
        response = await super().handle_async_request(request)
        status = response.status_code
        self._tell(f", with HTTP status {status}" if status >= 300 else "")
        response.headers.pop("content-encoding", None)
        response.stream = _Stream(response.stream, self._tell)
        return response


class _Stream(httpx2.AsyncByteStream):
    def __init__(
        self,
        stream: httpx2.SyncByteStream | httpx2.AsyncByteStream,
        tell: Callable[[str], None],
    ) -> None:
        assert isinstance(stream, httpx2.AsyncByteStream)
        self._stream, self._tell = stream, tell

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        room, values, begun = _MOST_BYTES, _MOST_VALUES, b""
        async for piece in self._stream:
            room -= len(piece) + _LEAST_COUNTED // 4 * (piece.count(b"\n") + piece.count(b"\r"))
            self._check(
                room, f"{_MOST_BYTES >> 20} MiB in a reply, short lines counted as 256 bytes"
            )
            # No string of JSON goes over the end of a line.
            lines = (begun + piece).splitlines(keepends=True)
            is_begun = lines and not lines[-1].endswith((b"\n", b"\r"))
            begun = lines.pop() if is_begun else b""
            values -= sum(num_values(line, _MOST_VALUES) for line in lines)
            self._check(values, f"{_MOST_VALUES:,} values in a reply")
            yield piece
        self._check(values - num_values(begun, _MOST_VALUES), f"{_MOST_VALUES:,} values in a reply")

    def _check(self, room: int, most: str) -> None:
        if room < 0:
            self._tell(f", and wrote more than {most}")
            raise httpx2.StreamError(f"more than {most}")

    @override
    async def aclose(self) -> None:
        await self._stream.aclose()


_shared: RunVar[dict[Server, Session]] = RunVar("sessions of MCP servers that rollouts share")
_listed: RunVar[dict[Server, Sequence[MCPTool]]] = RunVar("tools of MCP servers")


def shared(server: Server) -> Session:
    """The session of this event loop, with which it ends."""
    known = _shared.get({})
    _shared.set(known)
    if server not in known or known[server].is_retired:
        session = known[server] = Session(server)
        session.living.add_done_callback(lambda _: end_marked({session.mark}))
    return known[server]


async def listed(server: Server) -> Sequence[MCPTool]:
    """The tools that a server has; one that is shared is then there.

    Raises:
        EnvError: It does not start, is slow, or has tools that cannot be used.
    """
    known = _listed.get({})
    _listed.set(known)
    session = Session(server) if server.per_rollout else shared(server)
    try:
        known[server] = await session.tools()
    finally:
        if server.per_rollout:
            session.retire()
            await asyncio.wait((session.living,))
            end_marked({session.mark})
    return known[server]


def known_tools(server: Server) -> Sequence[MCPTool]:
    """Those that were listed before on this event loop."""
    return _listed.get()[server]
