"""What a server says of itself is checked before a model sees it."""

import re
from typing import Any

import pytest
from mcp.types import CallToolResult, Tool

from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.plugins.mcp import servers
from es_cookbook.rl.messages.tools import Result

SERVER = servers.Server("python server.py")
ANYTHING = {"type": "object"}


def tools(*names: str, description: str = "", schema: dict[str, Any] = ANYTHING) -> list[Tool]:
    return [Tool(name=name, description=description, input_schema=schema) for name in names]


def parameters_of(tool: servers.MCPTool) -> Any:
    function: Any = tool.schema["function"]
    return function["parameters"]


def nested(deep: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(deep):
        schema = {"properties": {"x": schema}}
    return {"type": "object", **schema}


def test_a_tool_is_told_to_a_chat_template_with_the_schema_of_its_server() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {}}}
    (tool,) = servers.checked_tools(SERVER, tools("look_up", description="Look.", schema=schema))
    function = {"name": "look_up", "description": "Look.", "parameters": schema}
    assert tool.schema == {"type": "function", "function": function}
    (tool,) = servers.checked_tools(SERVER, tools("now"))
    assert parameters_of(tool) == {"type": "object", "properties": {}}
    (tool,) = servers.checked_tools(SERVER, tools("deep", schema=nested(31)))
    assert parameters_of(tool) == nested(31)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ([], "has 0 tools; accepted are 1 to 128"),
        (tools(*map(str, range(129))), "has 129 tools; accepted are 1 to 128"),
        (tools("look up"), "the tool 'look up' must have a name of 1 to 128 letters"),
        (tools("t", schema={}), "must have a name"),
        (tools("t", schema={**ANYTHING, "properties": 3}), "a schema for each of its"),
        (tools("t", schema={**ANYTHING, "properties": {"x": 3}}), "a schema for each of its"),
        (tools("t", schema=nested(20_000)), "nested at most 64 deep"),
    ],
)
def test_what_cannot_be_shown_to_a_model_is_refused(described: list[Tool], said: str) -> None:
    with pytest.raises(EnvError) as caught:
        list(servers.checked_tools(SERVER, described))
    assert said in str(caught.value) and str(caught.value).isprintable()
    assert str(caught.value).startswith("the MCP server 'python server.py'")


def test_two_tools_of_one_name_are_refused() -> None:
    one = list(servers.checked_tools(SERVER, tools("a", "b")))
    two = list(servers.checked_tools(servers.Server("other"), tools("b")))
    servers.check_names(one)
    with pytest.raises(ConfigError, match=r"2 tools have the name 'b', of .*'other' and .*\.py'"):
        servers.check_names([*one, *two])
    with pytest.raises(ConfigError, match=r"2 tools have the name 'a', of .*'python server\.py'$"):
        servers.check_names([*one, *one])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("python server.py", "accepted are mcp:COMMAND and mcp:http://127.0.0.1:PORT/mcp"),
        ("", "accepted are"),
        ("mcp:", "accepted are"),
        ("mcp:http://192.0.2.1/mcp", "must be on this machine"),
        ("mcp:https://127.0.0.1/mcp", "must be on this machine"),
        ("mcp:http://127.0.0.1@evil.example/mcp", "must be on this machine"),
        ("mcp:ws://127.0.0.1/mcp", "must be on this machine"),
    ],
)
def test_what_names_no_server_of_this_machine_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        servers.targets(written)


def test_a_server_is_a_command_or_an_address_of_this_machine() -> None:
    for url in ("http://localhost/mcp", "http://[::1]:80/", "http://127.0.0.1:8000"):
        assert servers.targets(f"mcp:{url}") == [url]
    assert servers.targets("mcp:fetch http://192.0.2.1/x") == ["fetch http://192.0.2.1/x"]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}, "a\n"),
        ({"content": [], "structuredContent": {"x": "é"}}, '{"x": "é"}'),
        ({"content": [{"type": "text", "text": "3"}], "structuredContent": {"x": 3}}, "3"),
        ({"content": [{"type": "image", "data": "", "mimeType": "x/y"}]}, "[image left out]"),
        ({"content": [{"type": "resource", "resource": {"uri": "a:b", "text": "t"}}]}, "t"),
        (
            {"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": ""}}]},
            "[resource left out]",
        ),
        (
            {"content": [{"type": "resource_link", "uri": "file:///etc/passwd", "name": "n"}]},
            "[resource_link left out]",
        ),
        ({"content": [{"type": "text", "text": "x" * 35}]}, "x" * 30 + " [5 more characters]"),
    ],
)
def test_the_model_is_told_texts_or_json(result: dict[str, Any], text: str) -> None:
    assert servers.to_result(CallToolResult.model_validate(result), 30) == Result(text)
    failed = CallToolResult.model_validate({**result, "isError": True})
    assert servers.to_result(failed, 30) == Result(f"error: {text}", failed=True)
