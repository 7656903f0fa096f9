"""Messages and tools in JSON, of rows and of requests: read completely, or refused.

Read are `role` and `content`, of the assistant `tool_calls` and what it thought, of a tool
`tool_call_id` and `name`. A content is text, or parts of text, a line each. `developer` is the
system's role under a newer name. Results of tools are put in the order of their calls, by which
templates show whose they are.

An object is read through `JsonObject`: each field is taken by its type, and any that is not taken
is refused by its name, since it would change what its writer meant. So nothing goes on from here
but text, and the JSON of arguments and schemas, which is nested `DEEPEST` deep at most.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, cast

from es_cookbook.common.checks import LEAST
from es_cookbook.common.errors import DataError, nearest
from es_cookbook.common.files import strict_json
from es_cookbook.rl.messages.message import (
    DEEPEST,
    REASONING,
    ROLES,
    Message,
    ToolCall,
    as_json,
    is_deeper,
)
from es_cookbook.rl.messages.tools import ToolSchema

Json: TypeAlias = Mapping[str, object]

_ROLES = {"developer": "system", **{role: role for role in ROLES}}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text -> the field that has it."""
_UNDESCRIBED: Mapping[str, str | Json] = {
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
"""Fields that templates expect in every function."""
_LONGEST_NAME = 128
_KEPT = "cache_control"
"""A field for the service's caches, of messages, their parts and tools."""
_NOTHING = ("", [], {})
_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


class FieldError(DataError):
    """A field that is not as it must be.

    Attributes:
        where: the field, such as `messages[2].content`.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        return FieldError, (self.where, str(self).removeprefix(f"{self.where} "))


class JsonObject:
    """The fields of an object of JSON: each is taken once, as its type.

    A field that is null counts as absent; fields that are not taken must be empty.

    Args:
        found: the object.
        where: its name in errors; empty for the whole.

    Raises:
        FieldError: It is not an object.
    """

    def __init__(self, found: object, where: str = "") -> None:
        if not isinstance(found, dict):
            raise FieldError(where, f"must be an object, and is {_word(found)}")
        self._left = _given(found)
        self._read: list[str] = []
        self.where = where

    def at(self, name: str) -> str:
        """Return the full name of a field."""
        shown = name[:60] or '""'
        return f"{self.where}.{shown}" if self.where else shown

    def take(self, name: str, kind: type | tuple[type, ...], *default: object) -> Any:  # noqa: ANN401
        """Take a field of this type, or the default if it is missing.

        Raises:
            FieldError: It is of another type, or missing.
        """
        self._read.append(name)
        found = self._left.pop(name, None)
        if found is None and default:
            return default[0]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(found) in kinds:
            return found
        said = " or ".join(_WORDS[each] for each in kinds if each is not int or float not in kinds)
        what = "is missing" if found is None else f"is {_word(found)}"
        raise FieldError(self.at(name), f"must be {said}, and {what}")

    def text(self, name: str, *default: str) -> str:
        """Take a string."""
        return self.take(name, str, *default)

    def each(self, name: str) -> "list[JsonObject]":
        """Take the objects of an array; none if it is missing."""
        found = cast("Sequence[object]", self.take(name, list, ()))
        return [JsonObject(each, f"{self.at(name)}[{at}]") for at, each in enumerate(found)]

    def number(self, name: str, most: float) -> float | None:
        """Take a number: 0, or from the least divisor to `most`."""
        found = self.take(name, (int, float), None)
        if found and not LEAST <= found <= most:
            least = f"0, or from {LEAST:g}" if 0 < found < LEAST else "from 0"
            raise FieldError(self.at(name), f"must be {least} to {most:g}, found {found!r:.60}")
        return None if found is None else float(found)

    def count(self, name: str, most: int = 1 << 31, least: int = 1) -> int | None:
        """Take an integer from `least` to `most`."""
        found = self.take(name, int, None)
        if found is not None and not least <= found <= most:
            raise FieldError(self.at(name), f"must be from {least} to {most}, found {found!r:.60}")
        return found

    def unless_neutral(self, accepted: Mapping[str, Sequence[object]]) -> None:
        """Refuse fields with another value than these, which change nothing."""
        for name, values in accepted.items():
            found = self._left.pop(name, None)
            found = _given(found) if isinstance(found, dict) else found
            is_bool = isinstance(found, bool)  # false is not 0.
            same = (found == each and isinstance(each, bool) == is_bool for each in values)
            if found is not None and found not in _NOTHING and not any(same):
                listed = ", ".join(map(as_json, values)) or "null"
                raise FieldError(self.at(name), f"cannot be kept here; accepted is {listed}")

    def rest(self) -> dict[str, object]:
        """Take all fields not taken so far."""
        left, self._left = self._left, {}
        return left

    def idle(self, *names: str) -> None:
        """Accept fields that change nothing, with any value."""
        for name in names:
            self._left.pop(name, None)

    def only(self, of: str = "here") -> None:
        """Refuse all that was not taken; `of` says whose fields these are."""
        for name, value in self._left.items():
            if value not in _NOTHING:
                hint = nearest(name[:60], self._read)
                raise FieldError(self.at(name), f"is not read {of}; {hint}")


def _given(found: object) -> dict[str, object]:
    """Return an object's fields that are not null."""
    fields = cast("dict[str, object]", found).items()
    return {name: value for name, value in fields if value is not None}


def _word(found: object) -> str:
    """Return the JSON type of a value in words."""
    return _WORDS.get(type(found), type(found).__name__)


@dataclasses.dataclass(slots=True)
class Said:
    """A message, and its information about calls.

    Attributes:
        message: without calls.
        calls: calls by id.
        answers: the id of the call whose result this is; empty if not given.
        where: the field with that id.
    """

    message: Message
    calls: dict[str, ToolCall] = dataclasses.field(default_factory=dict[str, ToolCall])
    answers: str = ""
    where: str = ""

    def call(self, fields: JsonObject, id_in: str) -> None:
        """Add a call, whose id is in this field.

        Raises:
            FieldError: It is not a call, or its id is that of another one.
        """
        call_id = fields.text(id_in, "") or fields.where
        if call_id in self.calls:
            raise FieldError(fields.at(id_in), "must be its own, and is that of a call before it")
        self.calls[call_id] = read_call(function_of(fields))


def read_messages(found: object, where: str = "messages") -> tuple[Message, ...]:
    """Read the messages of a list.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Hi."}]}])
    (Message(role='system', content='Hi.', tool_calls=(), name=None, reasoning=''),)

    Args:
        found: the list.
        where: its name in errors.

    Raises:
        FieldError: A field of a message, and what is wrong with it.
    """
    messages = JsonObject({where: found}).each(where)
    return in_order([read_message(each) for each in messages], where)


def in_order(said: Sequence[Said], where: str = "messages") -> tuple[Message, ...]:
    """Return the messages, with the results of tools in the order of their calls.

    Raises:
        FieldError: There is none; or one is the result of no call, or comes without that of a call
            before its own.
    """
    if not said:
        raise FieldError(where, "must have at least one")
    messages: list[Message] = []
    waiting: dict[str, ToolCall] = {}  # Calls without a result, by id.
    for is_result, run in groupby(said, lambda each: each.message.role == "tool"):
        if is_result:
            messages += _results(list(run), waiting)
            continue
        for each in run:
            if each.calls and messages and messages[-1].role != "assistant":
                waiting.clear()
            waiting |= each.calls
            message = each.message
            if called := tuple(each.calls.values()):
                message = dataclasses.replace(message, tool_calls=called)
            messages.append(message)
    return tuple(messages)


def _results(run: Sequence[Said], waiting: dict[str, ToolCall]) -> list[Message]:
    """Return results in the order of their calls, and remove these from `waiting`."""
    places = {call: at for at, call in enumerate(waiting)}
    placed: list[tuple[int, Message]] = []
    for each in run:
        message, answered = each.message, each.answers or next(iter(waiting), "")
        call = waiting.pop(answered, None)
        if each.answers:
            if call is None:
                raise FieldError(each.where, "must be that of a call before it without a result")
            if message.name not in (None, call.name):
                what = f"is that of a call of {call.name!r:.60}, and not of {message.name!r:.60}"
                raise FieldError(each.where, what)
            message = dataclasses.replace(message, name=call.name)
        placed.append((places.get(answered, len(places)), message))
    if any(call in waiting for call in [*places][: len(run)]):
        raise FieldError(run[-1].where, "comes without the result of a call before its own")
    return [message for _, message in sorted(placed, key=lambda each: each[0])]


def read_message(fields: JsonObject) -> Said:
    """Read one message; errors are as in `read_messages`."""
    name = fields.text("role", "")
    role = _ROLES.get(name)
    if role is None:
        hint = nearest(name[:60], _ROLES)
        raise FieldError(fields.at("role"), f"is {'unknown' if name else 'missing'}; {hint}")
    if role == "assistant":
        said = _turn(fields)
    elif role == "tool":
        message = Message(role, read_content(fields), name=fields.text("name", "") or None)
        answers = fields.text("tool_call_id", "")
        said = Said(message, answers=answers, where=fields.at("tool_call_id"))
    else:
        said = Said(Message(role, read_content(fields)))
    fields.unless_neutral({"type": ("message", "text")})  # As lm-evaluation-harness writes.
    fields.idle(_KEPT)
    fields.only(of=f"in a message of the role {role}")
    return said


def _turn(fields: JsonObject) -> Said:
    said = Said(Message("assistant", ""))
    for each in fields.each("tool_calls"):
        each.idle("index")  # Of a call in a stream.
        said.call(each, "id")
    refusal = fields.text("refusal", "")
    content = read_content(fields, "content", *[""] * bool(refusal or said.calls))
    if refusal and (content or said.calls):
        raise FieldError(fields.at("refusal"), "must stand alone, without a content")
    given = {name: fields.text(name, "") for name in REASONING}
    thoughts = {name: thought for name, thought in given.items() if thought}
    if len({*thoughts.values()}) > 1:
        raise FieldError(fields.where, f"must have one thought, found {', '.join(thoughts)}")
    thought = next(iter(thoughts.values()), "")
    said.message = Message("assistant", content or refusal, reasoning=thought)
    return said


def read_content(fields: JsonObject, name: str = "content", *default: str) -> str:
    """Read a text, or parts that are text, one per line, or the default if it is missing.

    Raises:
        FieldError: It is something else.
    """
    found = fields.take(name, (str, list), *default)
    if isinstance(found, str):
        return found
    texts: list[str] = []
    for at, each in enumerate(found):
        part = JsonObject(each, f"{fields.at(name)}[{at}]")
        kind = part.text("type")
        if kind not in _TEXTS:
            raise FieldError(part.at("type"), f"must be {' or '.join(_TEXTS)}, found {kind!r:.60}")
        texts.append(part.text(_TEXTS[kind]))
        part.idle("annotations", "logprobs", _KEPT)  # Of answers, and for caches.
        part.only()
    return "\n".join(texts)


def read_call(fields: JsonObject) -> ToolCall:
    """Read a function's name, and its arguments as a string of JSON or an object.

    Raises:
        FieldError: They are something else.
    """
    name, found = fields.text("name"), fields.take("arguments", (str, dict), {})
    fields.only()
    _check_name(name, fields.at("name"))
    where = fields.at("arguments")
    try:
        arguments = strict_json(found or "{}") if isinstance(found, str) else found
    except ValueError as error:
        raise FieldError(where, f"must be JSON, and {error}") from error
    if not isinstance(arguments, dict):
        raise FieldError(where, f"must be the JSON of an object, and is that of {_word(arguments)}")
    _check_depth(arguments, where)
    return ToolCall(name, cast(Json, arguments))


def read_tools(tools: Sequence[JsonObject]) -> tuple[ToolSchema, ...]:
    """Read tools, each in its `function` or directly, as in the Responses API.

    Raises:
        FieldError: One is something else.
    """
    return tuple(map(_tool, tools))


def function_of(fields: JsonObject) -> JsonObject:
    """Return the function of a call, a tool or a choice: its `function`, or else itself.

    Raises:
        FieldError: It is of another type than `function`, or has more than its `function`.
    """
    if (found := fields.text("type", "function")) != "function":
        raise FieldError(fields.at("type"), f"must be function, found {found!r:.60}")
    function = fields.take("function", dict, None)
    if function is None:
        return fields
    fields.only()
    return JsonObject(function, fields.at("function"))


def _tool(fields: JsonObject) -> ToolSchema:
    fields.idle(_KEPT)
    fields = function_of(fields)
    fields.take("strict", bool, None)
    shown = fields.rest()
    fields = JsonObject(shown, fields.where)
    name = fields.text("name")
    _check_name(name, fields.at("name"))
    for key, value in _UNDESCRIBED.items():
        shown[key] = fields.take(key, type(value), value)
    _check_depth(shown, fields.where)
    return ToolSchema(name, {"type": "function", "function": shown})


def _check_name(name: str, where: str) -> None:
    """Refuse names that JSON writes otherwise, which templates do not."""
    if not 0 < len(name) <= _LONGEST_NAME or as_json(name) != f'"{name}"':
        raise FieldError(
            where,
            f"must have 1 to {_LONGEST_NAME} characters, none of which JSON escapes, "
            f"found {name!r:.60}",
        )


def _check_depth(value: object, where: str) -> None:
    if is_deeper(value, DEEPEST):
        raise FieldError(where, f"is nested more than {DEEPEST} deep")
