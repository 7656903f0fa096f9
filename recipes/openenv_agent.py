"""Train on an OpenEnv environment: its server has the tasks, and this program plays them.

    pip install openai websockets
    uvicorn my_env.server.app:app --port 8000
    es-cookbook train program="python recipes/openenv_agent.py http://127.0.0.1:8000" \
        dataset.rows_at_once=64 data=seeds.jsonl model_name=Qwen/Qwen2.5-0.5B-Instruct

A row is what the environment's `reset` gets, for example {"seed": 7}. If an action of the
environment is one text, the model's answer is the action. If it has MCP tools, the model calls
them. Any other action is a tool `step`, called with the action's fields. An answer that calls no
tool ends the episode. The reward is the sum of what the steps earn.
"""

import asyncio
import contextlib
import json
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

Json = Mapping[str, Any]


async def ask(socket: ClientConnection, kind: str, data: Json) -> Json:
    """Send a request, and return `observation`, `reward` and `done`."""
    with contextlib.suppress(ConnectionClosed):  # One that has closed may have said why.
        await socket.send(json.dumps({"type": kind, "data": data}))
    found = json.loads(await socket.recv())
    if found["type"] != "error":
        return found["data"]
    said = found["data"]["message"]
    if kind == "step" and found["data"]["code"] == "VALIDATION_ERROR":  # The model's own mistake.
        return {"observation": {"error": said}, "reward": 0.0, "done": False}
    raise RuntimeError(f"the environment says: {said}")


def shown(seen: Json) -> str:
    """Return an observation as text: its only text, or its fields."""
    found = {name: value for name, value in seen["observation"].items() if value not in (None, {})}
    if "tool_name" in found and "result" in found:
        found = {"result": found["result"]["data"]}
    values = list(found.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(found)


def tool(name: str, description: str, parameters: Json) -> Json:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


async def play(socket: ClientConnection, action: Json, row: Json, client: AsyncOpenAI) -> float:
    """Play an episode of an environment whose actions have this JSON schema."""
    seen = await ask(socket, "reset", row)
    fields = {name: field for name, field in action["properties"].items() if name != "metadata"}
    has_mcp = "tool_name" in fields
    is_text = not has_mcp and [field.get("type") for field in fields.values()] == ["string"]
    tools: list[Any] = []
    if has_mcp:
        known = (await ask(socket, "step", {"type": "list_tools"}))["observation"]["tools"]
        tools = [tool(each["name"], each["description"], each["input_schema"]) for each in known]
    elif not is_text:
        tools = [tool("step", action.get("description", ""), {**action, "properties": fields})]
    chat: list[Any] = [{"role": "user", "content": shown(seen)}]
    more: Any = {"tools": tools} if tools else {}
    reward = 0.0
    while not seen["done"]:
        answer = await client.chat.completions.create(model="policy", messages=chat, **more)
        said: Any = answer.choices[0].message
        chat.append(said)
        if is_text:
            seen = await ask(socket, "step", {next(iter(fields)): said.content})
            reward += seen["reward"] or 0.0
            chat.append({"role": "user", "content": shown(seen)})
        elif not said.tool_calls:
            break
        for call in said.tool_calls or ():
            if seen["done"]:
                break
            given = json.loads(call.function.arguments)
            if has_mcp:
                name = call.function.name
                given = {"type": "call_tool", "tool_name": name, "arguments": given}
            seen = await ask(socket, "step", given)
            reward += seen["reward"] or 0.0
            chat.append({"role": "tool", "tool_call_id": call.id, "content": shown(seen)})
    return reward


async def work(url: str, action: Json, task: Json, client: AsyncOpenAI) -> None:
    """Play the row of a line, and print what it earned."""
    own = client.with_options(base_url=task["base_url"], api_key=task["api_key"])
    try:
        async with connect(f"ws{url.removeprefix('http')}/ws", max_size=None) as socket:
            result: Json = {"reward": await play(socket, action, task["row"], own)}
    except (OpenAIError, OSError, RuntimeError, WebSocketException) as error:
        result = {"error": str(error)}  # A result without a reward: the rollout is lost.
    print(json.dumps({"id": task["id"], **result}), flush=True)


async def main(url: str) -> None:
    try:
        with urllib.request.urlopen(f"{url}/schema") as found:
            action = json.load(found)["action"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{url} is not the server of an OpenEnv environment: {error}")
    client = AsyncOpenAI(api_key="of each row")
    async with asyncio.TaskGroup() as rows:
        while line := await asyncio.to_thread(sys.stdin.readline):
            rows.create_task(work(url, action, json.loads(line), client))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the address of an environment, for example http://127.0.0.1:8000")
    asyncio.run(main(sys.argv[1].rstrip("/")))
