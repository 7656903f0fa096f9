"""Toolsets of a task, called in this process.

The library serves a `Toolset` as an MCP server in a separate process and calls it over HTTP. Here
the same server is an object, so names, schemas, checks of arguments and texts of errors are the
same. A toolset's state is its rollout's: it is copied to the toolset through JSON before a call and
back after it, as over HTTP.

A tool runs on the event loop. One that computes for long holds up all rollouts.
"""

import contextvars
import json
import weakref
from collections.abc import Sequence
from typing import Any, cast

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import TypeAdapter
from verifiers.v1.harnesses.utils.compaction import truncate_tool_output
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.state import state_cls

from es_cookbook.common.errors import EnvError
from es_cookbook.plugins.verifiers.library import Task, Toolset
from es_cookbook.rl.messages.tools import Result, ToolSchema

_STATE: contextvars.ContextVar[vf.Trace[Any, Any, Any]] = contextvars.ContextVar("trace")
"""The trace of the running call: a shared toolset serves many rollouts at once."""


class _Server:
    """One toolset, ready to be called."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset
        self._adapter = TypeAdapter(state_cls(type(toolset)))
        self._mcp = MCPServer(toolset.server_name or type(toolset).__name__)
        # The two methods by which a toolset fetches and returns its state over HTTP.
        vars(toolset).update(_pull_state=self._pull, _push_state=self._push)
        toolset.register(self._mcp)

    async def start(self, data: vf.TaskData | None) -> None:
        await self.toolset.setup()
        if data is not None:
            await self.toolset.setup_task(data)

    async def described(self) -> "dict[str, vf.Tool]":
        """Return the tools by the names that the toolset has for them."""
        prefix = f"{self.toolset.server_name}_" if self.toolset.server_name else ""
        return {
            tool.name: vf.Tool(
                name=f"{prefix}{tool.name}",
                description=tool.description or "",
                parameters=tool.input_schema,
            )
            for tool in await self._mcp.list_tools()
        }

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        try:
            found = await self._mcp.call_tool(name, arguments)
        except ToolError as error:
            return Result(truncate_tool_output(str(error)), failed=True)
        content = mcp_content_to_chat_content(cast("Any", found).content)
        if not isinstance(content, str):
            raise EnvError(f"the tool {name!r} returned an image, and only text is bridged")
        return Result(truncate_tool_output(content))

    async def close(self) -> None:
        await vars(self.toolset)["_exit_stack"].aclose()

    async def _pull(self) -> object:
        return self._adapter.validate_json(_STATE.get().state.model_dump_json())

    async def _push(self, before: bytes) -> None:
        after, trace = self._adapter.dump_json(self.toolset.state), _STATE.get()
        if after != before:
            trace.state = type(trace.state).model_validate_json(after)


class Tools:
    """The tools of one rollout.

    Attributes:
        tools: tools, as the trace records them.
    """

    def __init__(self) -> None:
        self.tools: list[vf.Tool] = []
        self._dispatch: dict[str, tuple[_Server, str]] = {}
        self._own: list[_Server] = []

    async def open(self, env: vf.Env[Any], task: Task) -> None:
        """Start the task's own toolsets, and the first time those that all tasks share.

        Raises:
            EnvError: Two tools have one name.
        """
        for toolset in cast("Sequence[Toolset]", type(task).toolsets(task.config)):
            server = _Server(toolset)
            self._own.append(server)
            await server.start(task.data)
        for server in (*self._own, *await _shared(env)):
            for name, tool in (await server.described()).items():
                if tool.name in self._dispatch:
                    raise EnvError(f"two tools of the task have the name {tool.name!r}")
                self._dispatch[tool.name] = server, name
                self.tools.append(tool)

    async def call(self, call: vf.ToolCall, trace: vf.Trace[Any, Any, Any]) -> Result:
        """Return the result of a call, for the model to read."""
        if call.name not in self._dispatch:
            return Result(f"error: unknown tool {call.name!r}", failed=True)
        server, name = self._dispatch[call.name]
        token = _STATE.set(trace)
        try:
            return await server.call(name, json.loads(call.arguments))
        finally:
            _STATE.reset(token)

    async def close(self) -> None:
        """End the task's own toolsets."""
        for server in self._own:
            await server.close()


_shared_servers: "weakref.WeakKeyDictionary[vf.Env[Any], Sequence[_Server]]" = (
    weakref.WeakKeyDictionary()
)


async def _shared(env: vf.Env[Any]) -> Sequence[_Server]:
    """Return the taskset's own toolsets, started once per process."""
    if env not in _shared_servers:
        taskset = env.taskset
        servers = [_Server(each) for each in type(taskset).toolsets(taskset.config)]
        for server in servers:
            await server.start(None)
        _shared_servers[env] = servers
    return _shared_servers[env]


async def described_tools(env: vf.Env[Any], task: Task) -> list[ToolSchema]:
    """Return the tools of a task for chat templates."""
    tools = Tools()
    try:
        await tools.open(env, task)
        shown = {"name", "description", "parameters"}
        functions = [tool.model_dump(include=shown) for tool in tools.tools]
        return [
            ToolSchema(each["name"], {"type": "function", "function": each}) for each in functions
        ]
    finally:
        await tools.close()
