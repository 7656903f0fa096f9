"""OpenAI's Responses API: its requests as those of chats, and a chat's answer in its form.

Nothing is kept on the server, so `previous_response_id`, `conversation` and `prompt` are refused: a
program sends the whole input, which continues from its tokens as a chat does.
"""

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from es_cookbook.plugins.endpoint.replies import Piece, Reply, event
from es_cookbook.plugins.endpoint.requests import ChatRequest, Json, read_chat
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.reading import (
    FieldError,
    JsonObject,
    Said,
    in_order,
    read_content,
    read_message,
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "logprobs": (False,),
    "n": (1,),
    "reasoning": (),
    "text": ({"format": {"type": "text"}},),
    "truncation": ("disabled",),
}


def response_request(body: Json) -> ChatRequest:
    """Read the body of `/v1/responses`.

    Raises:
        FieldError: A field is invalid or not supported.
    """
    fields = JsonObject(body)
    found = fields.take("input", (str, list))
    said = [Said(Message("user", found))] if isinstance(found, str) else _said(found)
    if instructions := fields.text("instructions", ""):
        said.insert(0, Said(Message("system", instructions)))
    fields.unless_neutral(_NEUTRAL)
    return read_chat(fields, in_order(said, "input"), fields.count("max_output_tokens"))


def _said(found: Sequence[object]) -> list[Said]:
    """Return items as messages; calls belong to the assistant's message before them."""
    said: list[Said] = []
    for at, each in enumerate(found):
        item = JsonObject(each, f"input[{at}]")
        kind = item.text("type", "message")
        item.idle("id", "status")
        if kind == "message":
            said.append(read_message(item))
        elif kind == "function_call":
            if not said or said[-1].message.role != "assistant":
                said.append(Said(Message("assistant", "")))
            said[-1].call(item, "call_id")
        elif kind == "function_call_output":
            message, call_id = Message("tool", read_content(item, "output")), item.text("call_id")
            item.only()
            said.append(Said(message, answers=call_id, where=item.at("call_id")))
        else:
            raise FieldError(
                item.at("type"), "must be message, function_call or function_call_output"
            )
    return said


def response(reply: Reply, request: ChatRequest) -> dict[str, object]:
    """Return a `response` with the whole answer."""
    usage, answer = reply.usage, reply.answers[0]
    is_cut = answer.finish == "length"
    return {
        **_begun(reply, request),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(reply),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": reply.cached or 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


async def response_events(
    reply: Reply, request: ChatRequest, pieces: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    """Yield the events of a stream: each item is added, filled and done."""
    number = itertools.count()

    def said(kind: str, **more: object) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(number), **more})

    def begins(at: int, item: Json, **empty: object) -> bytes:
        begun = {**item, **empty, "status": "in_progress"}
        return said("output_item.added", output_index=at, item=begun)

    begun = {**_begun(reply, request), "status": "in_progress", "output": []}
    yield said("created", response=begun)
    yield said("in_progress", response=begun)
    message, is_begun = _message(reply, ""), False
    (part,) = message["content"]
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    async for _, text, answer in pieces:
        if not is_begun and (text or (answer and not answer.calls)):
            is_begun = True
            yield begins(0, message, content=[])
            yield said("content_part.added", **place, part=part)
        if text:
            yield said("output_text.delta", **place, delta=text, logprobs=[])
    for at, item in enumerate(_items(reply)):
        if item["type"] == "function_call":
            of_call = {"item_id": item["id"], "output_index": at}
            name, arguments = item["name"], item["arguments"]
            yield begins(at, item, arguments="")
            yield said("function_call_arguments.delta", **of_call, delta=arguments)
            yield said("function_call_arguments.done", **of_call, arguments=arguments, name=name)
        else:
            (part,) = item["content"]
            yield said("output_text.done", **place, text=part["text"], logprobs=[])
            yield said("content_part.done", **place, part=part)
        yield said("output_item.done", output_index=at, item=item)
    whole = response(reply, request)
    yield said(str(whole["status"]), response=whole)


def _begun(reply: Reply, request: ChatRequest) -> dict[str, object]:
    draw = request.draw
    choice = request.choice
    return {
        "id": f"resp_{reply.digest}",
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": draw.max_tokens,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": draw.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": (
            {"type": "function", "name": json.loads(choice)} if choice.startswith('"') else choice
        ),
        "tools": [
            {"type": "function", "strict": False, **cast(Json, tool.schema["function"])}
            for tool in request.tools
        ],
        "top_p": draw.top_p,
    }


def _message(reply: Reply, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_{reply.digest}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    """Return the message, unless there are only calls, and the function calls."""
    message = cast("dict[str, Any]", reply.message(0))
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        items.append(_message(reply, message["content"] or ""))
    for call in calls:
        ids = {"id": call["id"].replace("call_", "fc_"), "call_id": call["id"]}
        items.append({"type": "function_call", **ids, "status": "completed", **call["function"]})
    return items
