"""MCP servers as users name them, and checks of their tool descriptions and results.

All of it is data. A description and a schema are shown to the model only: no reference in a schema
is followed, no pattern in it is matched, and arguments are checked by the server.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.terminal import cut, one_line
from es_cookbook.rl.messages.message import DEEPEST, is_deeper
from es_cookbook.rl.messages.tools import Result, Schema, ToolSchema, failed

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as Described

_LOOPBACK = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?(/[!-~]*)?")
_NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
"""Names that the protocol allows."""
MOST_TOOLS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server, and how it is used.

    Attributes:
        target: a command, or the URL of a server on this machine.
        per_rollout: each rollout that calls a tool has a separate server, or session over HTTP.
        timeout: seconds for a call, and for starting the server.
        at_once: maximum number of pending calls to a shared server, or of rollouts with separate
            servers.
        max_chars: maximum characters of a result; longer ones are truncated.
    """

    target: str
    per_rollout: bool = False
    timeout: float = 30.0
    at_once: int = 64
    max_chars: int = 4000

    @property
    def is_url(self) -> bool:
        """Whether the server runs already."""
        return "://" in self.target.split(" ", 1)[0]

    def __str__(self) -> str:
        return f"the MCP server {one_line(cut(self.target, 100))!r}"


def targets(tools: str) -> list[str]:
    """Parse `tools=`: "mcp:" and a command or URL, several separated by commas.

    >>> targets("mcp:python a.py --names=x,y, mcp:http://127.0.0.1:8000/mcp")
    ['python a.py --names=x,y', 'http://127.0.0.1:8000/mcp']

    Raises:
        ConfigError: There is none, or one that is not on this machine.
    """
    found = [each.strip() for each in re.split(r"(?:^|,)\s*mcp:", tools)]
    if found.pop(0) or not all(found) or not found:
        raise ConfigError(
            f"tools={tools!r:.200}: accepted are mcp:COMMAND and mcp:http://127.0.0.1:PORT/mcp, "
            "several with commas between them"
        )
    for target in found:
        if Server(target).is_url and not _LOOPBACK.fullmatch(target):
            raise ConfigError(
                f"tools=mcp:{target:.200}: a server must be on this machine, for example "
                "mcp:http://127.0.0.1:8000/mcp (or localhost, or [::1]), or a command that speaks "
                f"for it, such as mcp:npx mcp-remote {target:.200}"
            )
    return found


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MCPTool(ToolSchema):
    """A tool, and the server that runs it."""

    server: Server

    @property
    def parameters(self) -> Schema:
        """The schema of the arguments."""
        return cast(Mapping[str, Schema], self.schema["function"])["parameters"]


def checked_tools(server: Server, described: "Sequence[Described]") -> Iterator[MCPTool]:
    """Yield the tools of a server for chat templates, checked.

    Raises:
        EnvError: There are none or too many, or one cannot be shown to a model; says which.
    """
    if not 0 < len(described) <= MOST_TOOLS:
        raise EnvError(f"{server} has {len(described)} tools; accepted are 1 to {MOST_TOOLS}")
    for tool in described:
        if not _NAME.fullmatch(tool.name) or not _is_schema(tool.input_schema):
            raise EnvError(
                f"{server}: the tool {one_line(tool.name)!r:.100} must have a name of 1 to 128 "
                "letters, digits and any of _./-, and a schema of arguments of type 'object' with "
                f"a schema for each of its properties, nested at most {DEEPEST} deep"
            )
        function = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": {"properties": {}, **tool.input_schema},
        }
        yield MCPTool(tool.name, {"type": "function", "function": function}, server)


def check_names(tools: Sequence[MCPTool]) -> None:
    """Refuse two tools of one name, of one server or of two.

    Raises:
        ConfigError: Names the tool and the servers.
    """
    name, count = Counter(tool.name for tool in tools).most_common(1)[0]
    if count > 1:
        of = " and ".join(sorted({str(tool.server) for tool in tools if tool.name == name}))
        raise ConfigError(f"tools: {count} tools have the name {name!r}, of {of}")


def _is_schema(schema: Mapping[str, Any]) -> bool:
    """Return whether templates can show it: an object whose properties are objects, too."""
    properties = schema.get("properties", {})
    return (
        schema.get("type") == "object"
        and not is_deeper(schema, DEEPEST)
        and isinstance(properties, dict)
        and all(isinstance(each, dict) for each in cast("dict[str, Any]", properties).values())
    )


def to_result(result: "CallToolResult", max_chars: int) -> Result:
    """Return a result for the model: its texts, or its JSON if it has none.

    Pictures, sounds and links are left out, and named.
    """
    texts: list[str] = []
    for block in result.content:
        holder = block if block.type == "text" else getattr(block, "resource", None)
        text = getattr(holder, "text", None)
        texts.append(f"[{block.type} left out]" if text is None else str(text))
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = cut("\n".join(texts), max_chars)
    return failed(text) if result.is_error else Result(text)
