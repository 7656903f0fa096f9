"""OpenAI's Responses API: its requests as those of chats, and a chat's answer in its form.

Nothing is kept on the server, so `previous_response_id`, `conversation` and `prompt` are refused: a
program sends the whole input, which continues from its tokens as a chat does. Streams are refused,
too; chat completions have them.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from es_cookbook.plugins.endpoint.replies import Reply
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
    "context_management": (),
    "conversation": (),
    "include": ([],),
    "logprobs": (False,),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "reasoning": (),
    "stream": (False,),
    "text": ({"format": {"type": "text"}},),
    "top_logprobs": (0,),
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
    """Items as messages; calls belong to the assistant's message before them."""
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


def response(reply: Reply, asked: ChatRequest) -> dict[str, object]:
    """`response`, complete."""
    usage, choice = reply.usage, asked.choice
    is_cut = reply.answers[0].finish == "length"
    return {
        "id": f"resp_{reply.digest}",
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.model,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(reply),
        "parallel_tool_calls": not asked.one_call,
        "temperature": asked.draw.temperature,
        "top_p": asked.draw.top_p,
        "tool_choice": (
            {"type": "function", "name": json.loads(choice)} if choice.startswith('"') else choice
        ),
        "tools": [
            {"type": "function", "strict": False, **cast(Json, tool.schema["function"])}
            for tool in asked.tools
        ],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": reply.cached or 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(reply: Reply) -> list[dict[str, object]]:
    """The message, if there is one, and calls of functions."""
    message = cast("dict[str, Any]", reply.message(0))
    content, calls = message["content"], message.get("tool_calls", [])
    items: list[dict[str, object]] = []
    if content or not calls:
        part = {"type": "output_text", "text": content or "", "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.digest}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
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
