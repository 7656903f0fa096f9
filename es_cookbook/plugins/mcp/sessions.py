"""Sessions with MCP servers: opened, called within a time limit, and closed.

A session has its own task, because rollouts come and go, and any of them may open the one that all
share. After a failure it gets no more calls: it ends when pending ones are answered, and the next
call opens another.

A command is a process group, which ends with the session.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence

import anyio
from anyio.lowlevel import RunVar
from mcp import MCPError
from mcp.client import Client, ClientSession
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    PaginatedRequestParams,
)
from mcp.types import Tool as Described
from pydantic import ValidationError

from es_cookbook.common.errors import EnvError, leaves
from es_cookbook.common.terminal import cut, one_line
from es_cookbook.plugins.mcp.servers import MOST_TOOLS, MCPTool, Server, checked_tools, to_result
from es_cookbook.plugins.mcp.transports import http, stdio
from es_cookbook.rl.messages.tools import Result, failed

_SECONDS_TO_END = 3.0
"""Time for the process, or a session over HTTP, to end."""

# The library logs failures with tracebacks; they are reasons of lost rollouts already.
for _name in ("mcp", "client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class Session:
    """One session; opened at once, in the background.

    Attributes:
        is_retired: it takes no more calls.
        living: done when it has ended.
    """

    def __init__(self, server: Server) -> None:
        self.is_retired = False
        self._server = server
        self._num_calls = 0
        self._why = ""
        self._tools: Sequence[MCPTool] = ()
        self._over, self._scope = asyncio.Event(), anyio.CancelScope()
        self._opened: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self.living = asyncio.create_task(self._live())

    async def tools(self) -> Sequence[MCPTool]:
        """Return the tools that the server has.

        Raises:
            EnvError: It does not start, is slow, or has tools that cannot be used.
        """
        async with self._in_use():
            return self._tools

    async def call(self, tool: MCPTool, arguments: Mapping[str, object]) -> Result:
        """Return the result of a call, for the model to read.

        Raises:
            EnvError: The server is slow, has ended, or its answer is not a result.
        """
        params = CallToolRequestParams(name=tool.name, arguments=dict(arguments))
        try:
            params.model_dump_json()
        except ValueError:
            return failed(f"{tool.name}: the arguments are nested too deeply, or no text")
        async with self._in_use() as client:
            if (tool.name, tool.parameters) not in [(t.name, t.parameters) for t in self._tools]:
                raise EnvError(f"{self._server} no longer has the tool {tool.name!r} as it was")
            request = CallToolRequest(params=params)
            try:
                # Not `call_tool`, which checks results by a schema of the server's.
                found = await client.send_request(request, CallToolResult)
            except MCPError as error:
                if error.code != INVALID_PARAMS:
                    raise
                return failed(cut(error.message, self._server.max_chars))
        return to_result(found, self._server.max_chars)

    def retire(self) -> None:
        """Take no more calls, and end after those in progress."""
        self.is_retired = True
        if not self._num_calls:
            self._end()

    def _ended(self, how: str) -> None:
        """Fail calls in progress, with the reason: the server has ended, or is cut off."""
        self._why = self._why or f"{self._server} {how}"
        self.is_retired = True
        self._over.set()

    def _end(self) -> None:
        if self._opened.done():
            self._over.set()
        else:
            self._scope.cancel()

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncGenerator[ClientSession]:
        """Yield the client for a request to the server; failures are raised as `EnvError`."""
        self._num_calls += 1
        try:
            with anyio.fail_after(self._server.timeout):
                yield await asyncio.shield(self._opened)
        except BaseException as error:
            self.is_retired = True  # Also if the rollout is cancelled: it is still at the call.
            if isinstance(error, TimeoutError):
                why = f"{self._server} did not answer within {self._server.timeout:g} s"
            elif isinstance(error, MCPError):
                if _is_closed(error):
                    self._end()
                    await asyncio.wait((self.living,))
                message = one_line(error.message)[:200]
                why = self._why or f"{self._server} answered with an error: {message}"
            elif isinstance(error, ValidationError):
                why = f"{self._server} answered with something other than a tool's result"
            else:
                raise
            raise EnvError(why) from None
        finally:
            self._num_calls -= 1
            if self.is_retired:
                self.retire()

    async def _live(self) -> None:
        server = self._server
        try:
            target = server.target
            transport = http(target) if server.is_url else stdio(target, self._ended)
            with self._scope:
                async with Client(transport, cache=None) as client:
                    self._tools = list(checked_tools(server, await _all_tools(client.session)))
                    self._opened.set_result(client.session)
                    await self._over.wait()
                    self._scope.deadline = anyio.current_time() + _SECONDS_TO_END
        except Exception as error:
            first = next(leaves(error))
            if isinstance(first, EnvError):
                why = str(first)
            elif isinstance(first, ValidationError):
                why = f"{server} answered with something other than a list of tools"
            else:
                why = one_line(f"{type(first).__name__}: {first}")[:200]
                why = f"{server} cannot be talked to: {why}"
            self._why = self._why or why
        finally:
            self._ended("has ended")
            if not self._opened.done():
                self._opened.set_exception(EnvError(self._why))
                self._opened.exception()  # It need not be awaited.


def _is_closed(error: MCPError) -> bool:
    """Return whether the library raised it; servers use the same code for own errors."""
    return error.code == CONNECTION_CLOSED and error.message == "Connection closed"


async def _all_tools(client: ClientSession) -> "list[Described]":
    """Return all tools, of all pages, but no more than one too many."""
    tools: list[Described] = []
    cursor = None
    while len(tools) <= MOST_TOOLS:
        page = await client.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if not cursor or not page.tools:
            break
    return tools


_shared: RunVar[dict[Server, Session]] = RunVar("sessions of MCP servers that rollouts share")
_listed: RunVar[dict[Server, Sequence[MCPTool]]] = RunVar("tools of MCP servers")


def shared(server: Server) -> Session:
    """Return the session of this event loop, with which it ends."""
    known = _shared.get({})
    _shared.set(known)
    if server not in known or known[server].is_retired:
        known[server] = Session(server)
    return known[server]


async def listed(server: Server) -> Sequence[MCPTool]:
    """Return the tools that a server has; a shared session is open then.

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
    return known[server]


def known_tools(server: Server) -> Sequence[MCPTool]:
    """Return the server's tools, which were listed before on this event loop."""
    return _listed.get()[server]
