"""Chats in the shapes that templates know, and what of a chat a text lacks.

A change writes a chat in another way and leaves nothing out. Pieces that are joined have a blank
line between them.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from es_cookbook.rl.messages.message import REASONING, Message, call_text
from es_cookbook.rl.messages.thoughts import said_spans

Change: TypeAlias = Callable[[Sequence[Message]], list[Message]]
Shape: TypeAlias = tuple[Message, ...]
_FLAGS = re.compile(r"/(?:no_)?think\b")
"""Templates of some thinking models take these words out of what is said, and obey them."""


class Gap(NamedTuple):
    """What of a message a text does not have."""

    at: int
    what: str


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls in the form of Hermes, and the results of a turn as one message of the user."""
    changed: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            changed.append(Message("user", "\n".join(result.content for result in run)))
            continue
        for message in run:
            calls = [call_text(call, "hermes") for call in message.tool_calls]
            content = "\n".join(filter(None, (message.content, *calls)))
            changed.append(dataclasses.replace(message, content=content, tool_calls=()))
    return changed


def one_system(messages: Sequence[Message]) -> list[Message]:
    """The system's messages before all others as one, later ones with the user's next."""
    rest = no_system(messages[(num := _num_leading(messages)) :])
    leading = [message.content for message in messages[:num]]
    return [Message("system", "\n\n".join(leading)), *rest] if leading else rest


def no_system(messages: Sequence[Message]) -> list[Message]:
    """The system's messages before what the user says next, or as if the user said them."""
    changed: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.content)
        elif message.role == "user" and waiting:
            changed.append(Message("user", "\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            changed.append(message)
    return [*changed, Message("user", "\n\n".join(waiting))] if waiting else changed


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message; results of tools stay apart."""
    changed: list[Message] = []
    for message in messages:
        last = changed[-1] if changed else None
        if last is None or last.role != message.role or message.role == "tool":
            changed.append(message)
            continue
        changed[-1] = dataclasses.replace(
            last,
            content="\n\n".join(filter(None, (last.content, message.content))),
            tool_calls=last.tool_calls + message.tool_calls,
            reasoning="\n\n".join(filter(None, (last.reasoning, message.reasoning))),
        )
    return changed


CHANGES: tuple[Change, ...] = (calls_as_text, one_system, no_system, alternating)
"""In the order in which they are made."""


def applied(changes: Sequence[Change], messages: Sequence[Message]) -> Shape:
    """The chat after these changes."""
    for change in changes:
        messages = change(messages)
    return tuple(messages)


def gap_in(messages: Sequence[Message], text: str) -> Gap | None:
    """What of the messages is not in a text, blanks and the way JSON writes it aside.

    Of the assistant's messages only what is said has to be there, and of thoughts beside it only
    those of the last: templates drop thoughts of earlier turns.
    """
    shown = _squeezed(text)
    for at, message in enumerate(messages):
        for what, said in _parts(message, is_last=at == len(messages) - 1):
            if _squeezed(said) not in shown and _squeezed(_escaped(said)) not in shown:
                return Gap(at, what)
    return None


def _parts(message: Message, *, is_last: bool) -> Iterator[tuple[str, str]]:
    said = message.content
    spans = said_spans(said) if message.role == "assistant" else [(0, len(said))]
    for start, end in spans:
        yield ("the content", said[start:end])
    if is_last:
        yield (f"what is thought ({', '.join(REASONING)})", message.reasoning)
    for call in message.tool_calls:  # Other values than plain words are written in many ways.
        words = (each for each in call.arguments.values() if isinstance(each, str))
        for word in (call.name, *(word for word in words if word.isalnum())):
            yield ("a call of a tool (tool_calls)", word)


def _num_leading(messages: Sequence[Message]) -> int:
    others = (at for at, message in enumerate(messages) if message.role != "system")
    return next(others, len(messages))


def _escaped(text: str) -> str:
    """As it stands in JSON, in which some templates show results of tools."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _squeezed(text: str) -> str:
    """Blanks as one: templates trim what is said."""
    return " ".join(_FLAGS.sub("", text).split())
