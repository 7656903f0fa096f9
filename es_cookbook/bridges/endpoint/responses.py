"""OpenAI's Responses API: its requests as those of chats, and a chat's answer in its form.

Nothing is kept on the server, so `previous_response_id`, `conversation` and `prompt` are refused: a
program sends the whole input, and goes on from its tokens as a chat does.
"""

import json
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, cast

from es_cookbook.bridges.endpoint.replies import Piece, Reply, event
from es_cookbook.bridges.endpoint.requests import (
    ChatRequest,
    Fields,
    Json,
    RefusedRequest,
    chat_request,
)
from es_cookbook.bridges.endpoint.translator import Answer

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "reasoning": (),
    "text": ({"format": {"type": "text"}},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_TEXTS = ("input_text", "output_text", "text", "refusal")
_READ: Mapping[str, Collection[str]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Items -> their fields that are read."""
_OF_ANSWERS = ("id", "type", "status", "text", "refusal", "annotations", "logprobs")
"""What items and parts that a server has given have besides, and say nothing to a model."""


def response_request(body: Json) -> ChatRequest:
    """Read the body of `/v1/responses`.

    Raises:
        RefusedRequest: Something of it cannot be kept.
    """
    fields = Fields(body, _NEUTRAL)
    messages = _chat(fields.take("input", (str, list)))
    if (instructions := fields.take("instructions", str, None)) is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    tools = [_tool(each, at) for at, each in enumerate(fields.take("tools", list, []))]
    choice = fields.take("tool_choice", (str, dict), None)
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": cast(Json, choice).get("name")}}
    most = fields.count("max_output_tokens")
    return chat_request(
        {
            **fields.rest(),
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "max_completion_tokens": most,
        }
    )


def _chat(found: str | Sequence[object]) -> list[dict[str, Any]]:
    """Items as messages; calls belong to the assistant's message before them."""
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    messages: list[dict[str, Any]] = []
    for at, each in enumerate(found):
        where = f"input[{at}]"
        item = cast("dict[str, Any]", each) if isinstance(each, dict) else {}
        kind = item.get("type", "message")
        if kind in _READ:
            _refuse_others(item, _READ[kind], where)
        if kind == "message":
            content = _text(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            raise RefusedRequest(
                f"{where}.type must be message, function_call or function_call_output", param=where
            )
    return messages


def _refuse_others(found: Mapping[str, object], read: Collection[str], where: str) -> None:
    """Refuse fields that have a value and are not read."""
    for name, value in found.items():
        if value and name not in (*read, *_OF_ANSWERS):
            raise RefusedRequest(f"{where}.{name} cannot be kept here", param=f"{where}.{name}")


def _text(found: object, where: str) -> str:
    parts = cast("list[object]", found) if isinstance(found, list) else [found]
    texts: list[str] = []
    for part in parts:
        if isinstance(part, dict) and cast(Json, part).get("type") in _TEXTS:
            _refuse_others(cast(Json, part), (), where)
            part = cast(Json, part).get("text", cast(Json, part).get("refusal"))
        if not isinstance(part, str):
            raise RefusedRequest(f"{where} must be text, or parts of it", param=where)
        texts.append(part)
    return "\n".join(texts)


def _tool(found: object, at: int) -> Json:
    tool = dict(cast(Json, found)) if isinstance(found, dict) else {}
    if tool.pop("type", None) != "function":
        raise RefusedRequest(f"tools[{at}] must be of type function", param=f"tools[{at}]")
    return {"type": "function", "function": tool}


def response(reply: Reply, asked: ChatRequest) -> dict[str, object]:
    """`response`, complete."""
    usage, answer = reply.usage, reply.answers[0]
    is_cut = answer.finish == "length"
    return {
        **_begun(reply, asked),
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
    reply: Reply, asked: ChatRequest, pieces: AsyncIterator[Piece]
) -> AsyncIterator[bytes]:
    """What a stream of it consists of: each item begins, is written, and ends."""
    number = iter(range(1 << 30))

    def said(kind: str, **more: object) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(number), **more}, True)

    def begins(at: int, item: Json, **empty: object) -> bytes:
        begun = {**item, **empty, "status": "in_progress"}
        return said("output_item.added", output_index=at, item=begun)

    def part_begins(place: Json, part: Json) -> bytes:
        return said("content_part.added", **place, part={**part, "text": "", "logprobs": []})

    begun = {**_begun(reply, asked), "status": "in_progress", "output": []}
    yield said("created", response=begun)
    yield said("in_progress", response=begun)
    message, sent = _message(reply, ""), 0
    (part,) = message["content"]
    place = {"item_id": message["id"], "output_index": 0, "content_index": 0}
    async for _, piece in pieces:
        if isinstance(piece, Answer):
            continue
        if not sent:
            yield begins(0, message, content=[])
            yield part_begins(place, part)
        sent += len(piece)
        yield said("output_text.delta", **place, delta=piece, logprobs=[])
    for at, item in enumerate(_items(reply)):
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": at}
            arguments = item["arguments"]
            yield begins(at, item, arguments="")
            yield said("function_call_arguments.delta", **place, delta=arguments)
            yield said(
                "function_call_arguments.done", **place, arguments=arguments, name=item["name"]
            )
        else:
            (part,) = item["content"]
            if not sent:
                yield begins(at, item, content=[])
                yield part_begins(place, part)
            if rest := part["text"][sent:]:
                yield said("output_text.delta", **place, delta=rest, logprobs=[])
            yield said("output_text.done", **place, text=part["text"], logprobs=[])
            yield said("content_part.done", **place, part=part)
        yield said("output_item.done", output_index=at, item=item)
    whole = response(reply, asked)
    yield said(str(whole["status"]), response=whole)


def _begun(reply: Reply, asked: ChatRequest) -> dict[str, object]:
    draw = asked.draw
    choice = asked.choice
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
        "parallel_tool_calls": not asked.one_call,
        "previous_response_id": None,
        "temperature": draw.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": (
            {"type": "function", "name": json.loads(choice)} if choice.startswith('"') else choice
        ),
        "tools": [
            {"type": "function", "strict": False, **cast(Json, tool.schema["function"])}
            for tool in asked.tools
        ],
        "top_p": draw.top_p,
        "truncation": "disabled",
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
    """The message, if there is one, and calls of functions."""
    message = cast("dict[str, Any]", reply.message(0))
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        items.append(_message(reply, message["content"] or ""))
    for call in calls:
        items.append(
            {
                "type": "function_call",
                "id": call["id"].replace("call_", "fc_"),
                "call_id": call["id"],
                "status": "completed",
                **call["function"],
            }
        )
    return items
