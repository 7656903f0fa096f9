"""Tools: what the model is told of them, how they run, and what goes wrong."""

import dataclasses
import os
import time
from typing import Annotated, Literal

import anyio
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.messages.message import ToolCall
from es_cookbook.rl.messages.tools import Result, Tool, run_call, tool


@tool
def process(text: str) -> str:
    """In which process it runs.

    Args:
        text: comes back
    """
    return f"{text} {os.getpid()}"


@tool(timeout=0.5)
def hang(seconds: float) -> str:
    """Take long.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


@tool(timeout=60)
def forever() -> None:
    """Take very long."""
    time.sleep(60)


@tool(quick=True)
def convert(
    unit: Literal["m", "km"], values: list[int], exact: bool = False, note: str | None = None
) -> dict[str, object]:
    """Convert.

    Args:
        unit: of the values
        values: whole numbers
        exact: or not
        note: kept
    """
    if note == "raise":
        raise ValueError("no such\nnote")
    return {"unit": unit, "values": values, "exact": exact}


@tool(quick=True, errors="lose")
def server() -> str:
    """Fail."""
    raise ConnectionError("down")


HERE = {"lat": 1, "lon": 2}
PLACE = {
    "properties": {"lat": {"type": "number", "maximum": 90}, "lon": {"type": "number"}},
    "required": ["lat", "lon"],
    "additionalProperties": False,
}


@tool(quick=True)
def rain(place: Annotated[dict[str, float], PLACE], n: Annotated[int, {"minimum": 0}]) -> list[int]:
    """Tell the rain.

    Args:
        place: where
        n: days
    """
    return [0] * n


TOOLS = (process, hang, convert, server, rain)


async def run(name: str, **arguments: object) -> Result:
    return await run_call(ToolCall(name, arguments), TOOLS)


async def test_a_plain_function_runs_in_another_process_unless_it_is_quick() -> None:
    result = await run("process", text="pid")
    assert not result.failed
    assert result.text.startswith("pid ")
    assert result.text != f"pid {os.getpid()}"
    assert await run("convert", unit="m", values=[1]) == Result(
        '{"unit": "m", "values": [1], "exact": false}'
    )
    call = ToolCall("convert", {"unit": "m", "values": [1]})
    brief = dataclasses.replace(convert, max_chars=9)
    assert await run_call(call, [brief]) == Result('{"unit":  [35 more characters]')


async def test_a_call_that_takes_too_long_ends_and_the_model_is_told() -> None:
    result = await run("hang", seconds=60)
    assert result.failed
    assert "was not done after 0.5 s" in result.text

    async def wait() -> str:
        """Wait."""
        await anyio.sleep(60)
        return "done"

    result = await run_call(ToolCall("wait", {}), [Tool(wait, timeout=0.01)])
    assert result == Result("error: wait: TimeoutError: not done after 0.01 s", True)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("convart", {}, "there is no tool 'convart'; did you mean 'convert'?; there are: process,"),
        ("convert", {"unit": "m"}, "convert: argument 'values' is missing"),
        ("convert", {"unit": "m", "values": [], "x": 1}, "unknown argument 'x'; accepted: unit,"),
        ("convert", {"unit": "x", "values": []}, "argument 'unit': 'x' is not one of ['m', 'km']"),
        ("convert", {"unit": "m", "values": [True]}, "'values'[0]: True is not of type 'integer'"),
        ("rain", {"place": HERE, "n": -5}, "argument 'n': -5 is less than the minimum of 0"),
        ("rain", {"place": HERE, "n": 1.0}, "argument 'n': 1.0 is not of type 'integer'"),
        ("rain", {"place": {"lat": 1}, "n": 1}, "argument 'place': 'lon' is a required property"),
        ("rain", {"place": "x" * 10_000, "n": 1}, "xxxx' is against type='object'"),
        ("convert", {"unit": "m", "values": [], "note": "raise"}, "convert: ValueError: no such"),
    ],
)
async def test_what_is_wrong_with_a_call_is_told(
    name: str, arguments: dict[str, object], told: str
) -> None:
    result = await run(name, **arguments)
    assert result.failed
    assert result.text.startswith("error: ")
    assert told in result.text
    assert "\n" not in result.text


async def test_a_tool_may_lose_the_rollout_instead() -> None:
    with pytest.raises(ConnectionError, match="down"):
        await run("server")


async def test_cancelling_a_rollout_cancels_its_tool() -> None:
    events: list[str] = []

    async def wait() -> str:
        """Wait."""
        events.append("began")
        try:
            await anyio.sleep(60)
        finally:
            events.append("cancelled")
        return "done"

    with anyio.move_on_after(0.05) as scope:
        await run_call(ToolCall("wait", {}), [Tool(wait)])
    assert scope.cancelled_caught
    assert events == ["began", "cancelled"]
    with anyio.move_on_after(0.2) as scope:
        await run_call(ToolCall("forever", {}), [forever])
    assert scope.cancelled_caught


def test_a_tool_that_cannot_be_described_is_refused() -> None:
    def bare(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return x

    with pytest.raises(ConfigError, match="the tool 'bare' cannot be described to a model: it ne"):
        _ = Tool(bare).schema
