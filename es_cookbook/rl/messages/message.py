r"""Chat messages, and the tool calls in what models write, in the form of Hermes or of Llama.

    hermes  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number, text between
    llama   {"name": "add", "parameters": {"a": 1}}, nothing before it but `<|python_tag|>`;
            further calls after a semicolon or a blank

Messages follow the dictionaries of `apply_chat_template` in transformers, which `as_dict` gives.

Reading calls takes time linear in the text and raises nothing. A call that cannot be read becomes a
sentence for the model, which says what is wrong with it. transformers' `parse_response` needs a
template for each tokenizer, which few have, and fails as a whole where one call of a message is
damaged.

Left out: calls as Python or XML (Llama's `[f(x=1)]`, Qwen3-Coder's `<function=f>`).
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import EnvError, nearest

ROLES = ("system", "user", "assistant", "tool")
Form: TypeAlias = Literal["hermes", "llama"]
"""How a model writes calls."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MOST_CALLS = 32
"""Calls in one message."""
LONGEST_CALL = 20_000
"""Characters of one call."""

ARGUMENTS: Mapping[Form, str] = {"hermes": "arguments", "llama": "parameters"}
"""What calls name their arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for: a tool's name, and arguments as JSON has them, by name."""

    name: str
    arguments: Mapping[str, object]

    def __hash__(self) -> int:
        """By the name alone: arguments are JSON, and have no hash."""
        return hash(self.name)

    def as_dict(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    >>> Message("tool", "42", name="calculate").as_dict()
    {'role': 'tool', 'content': '42', 'name': 'calculate'}

    Attributes:
        role: one of `ROLES`.
        content: its text.
        tool_calls: what an assistant's message calls.
        name: of the tool whose result this is.

    Raises:
        EnvError: An unknown role, or a content that is no text.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise EnvError(
                f"a message has the unknown role {self.role!r:.60}; "
                f"{nearest(str(self.role), ROLES)}"
            )
        if not isinstance(self.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise EnvError(
                f"the content of a message must be text, found {type(self.content).__name__} in "
                f"the role {self.role!r}"
            )

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.name is not None:
            fields["name"] = self.name
        return fields


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
    """A model's text, read.

    Attributes:
        content: the text without its calls, stripped.
        calls: those that could be read, in order.
        problems: for each that could not, a sentence for the model.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def parse_tool_calls(text: str, form: Form) -> Parsed:
    """Read the calls in a model's text.

    >>> parse_tool_calls('{"name": "add", "parameters": {"a": 1}}', "llama").calls
    (ToolCall(name='add', arguments={'a': 1}),)
    >>> parse_tool_calls("<tool_call>add(1)</tool_call>", "hermes").problems
    ('a tool call is no JSON: Expecting value at character 0',)
    """
    content, bodies = _hermes(text) if form == "hermes" else _llama(text)
    calls: list[ToolCall] = []
    problems: list[str] = []
    for body in itertools.islice(bodies, MOST_CALLS):
        try:
            calls.append(_call(body, ARGUMENTS[form]))
        except (ValueError, RecursionError) as error:
            problems.append(f"a tool call {_reason(error)}")
    if next(bodies, None) is not None:
        problems.append(f"only the first {MOST_CALLS} tool calls of a message are read")
    return Parsed(content, tuple(calls), tuple(problems))


def call_text(call: ToolCall, form: Form) -> str:
    """A call as a model writes it; `parse_tool_calls` reads it back."""
    body = json.dumps({"name": call.name, ARGUMENTS[form]: dict(call.arguments)})
    return f"{OPEN}\n{body}\n{CLOSE}" if form == "hermes" else body


def _hermes(text: str) -> tuple[str, Iterator[str]]:
    """The text without its calls, and the calls; one that is not closed goes to the text's end."""
    content: list[str] = []
    calls: list[str] = []
    at = 0
    while (start := text.find(OPEN, at)) >= 0 and len(calls) <= MOST_CALLS:
        end = text.find(CLOSE, start)
        stop = len(text) if end < 0 else end + len(CLOSE)
        content.append(text[at:start])
        calls.append(text[start:stop])
        at = stop
    return "".join([*content, text[at:]]).strip(), iter(calls)


def _llama(text: str) -> tuple[str, Iterator[str]]:
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    return ("", _objects(body)) if body.startswith("{") else (text.strip(), iter(()))


def _objects(body: str) -> Iterator[str]:
    """The JSON values that semicolons or blanks separate; the last may be damaged."""
    if len(body) > LONGEST_CALL:
        yield body
        return
    at = 0
    while at < len(body):
        start = at
        try:
            _, at = json.JSONDecoder().raw_decode(body, at)
        except (ValueError, RecursionError):
            at = len(body)
        yield body[start:at]
        while at < len(body) and (body[at] == ";" or body[at].isspace()):
            at += 1


class _WrongError(ValueError):
    """What is wrong with a call, after "a tool call"."""


def _refuse(name: str) -> None:
    raise _WrongError(f"is damaged: {name} is no JSON")


def _finite(number: str) -> float:
    """JSON's 1e999 would be read as infinity, which no tool expects."""
    if not math.isfinite(value := float(number)):
        raise _WrongError("has a number that is too large")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)


def _reason(error: Exception) -> str:
    match error:
        case _WrongError():
            return str(error)
        case json.JSONDecodeError():
            return f"is no JSON: {error.msg} at character {error.pos}"
        case RecursionError():
            return "is nested too deeply"
        case _:  # A number with thousands of digits.
            return "has a number with too many digits"


def _call(body: str, arguments_key: str) -> ToolCall:
    if body.startswith(OPEN):
        if not body.endswith(CLOSE):
            raise _WrongError(f"is not closed: {CLOSE} is missing")
        body = body[len(OPEN) : -len(CLOSE)]
    if len(body) > LONGEST_CALL:
        raise _WrongError(f"has {len(body)} characters; at most {LONGEST_CALL} are read")
    found = _DECODER.decode(body.strip())
    if not isinstance(found, dict):
        raise _WrongError("must be a JSON object")
    fields = cast("dict[str, object]", found)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise _WrongError('has no "name", which must be the name of a tool')
    arguments = fields.get(arguments_key, {})
    if isinstance(arguments, str):  # Some models quote the object.
        arguments = _DECODER.decode(arguments.strip() or "{}")
    if not isinstance(arguments, dict):
        raise _WrongError(f'must have a JSON object as "{arguments_key}"')
    return ToolCall(name, cast("Mapping[str, object]", arguments))
