r"""Chat messages, and the tool calls in what models write, in the form of Hermes or of Llama.

    hermes  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number, text between
    llama   {"name": "add", "parameters": {"a": 1}}, nothing before it but `<|python_tag|>`;
            further calls after a semicolon or a blank

Messages follow the dictionaries of `apply_chat_template` in transformers, which `as_dict` gives.

Calls count in what is said (`es_cookbook.rl.messages.thoughts`): one that a model only thinks of is
text. A call is JSON up to where that ends, so a tag in one of its arguments closes nothing. It has
a name and arguments, under the key of either form, and nothing else. One that cannot be read stays
in the text, and becomes a sentence for the model, which says what is wrong with it; others beside
it are read all the same. A JSON object at the beginning of a text which is nothing like a call of
Llama's, such as `{"name": "Ann", "age": 4}`, is an answer. That takes time linear in the text, and
raises nothing.

Calls in other formats, such as Python, XML or between special tokens, which an action's text does
not have, are read by the tokenizer's response template, if it has one (`read_turn`). It describes
how a model writes calls, as a chat template describes how they are shown; `parse_response` of
transformers (5.13 and newer) gets the turn up to a stop text, without its thoughts. It fails as a
whole if one call is damaged or has a closing tag inside an argument. A turn in which it fails or
finds no call is read in the two forms above.

Source: https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

import bisect
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias, cast

from es_cookbook.common.errors import EnvError, nearest
from es_cookbook.common.files import strict_json
from es_cookbook.common.terminal import one_line
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.encoder import Controls
from es_cookbook.rl.messages.thoughts import (
    THOUGHTS,
    opened_thought,
    said_spans,
    spoken,
    whole_turn,
)
from es_cookbook.rl.types import Action, Tokenizer

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that services and templates use for reasoning beside a content."""
Form: TypeAlias = Literal["hermes", "llama"]
"""The format in which a model writes calls."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MOST_CALLS = 32
"""Calls in one message."""
LONGEST_CALL = 20_000
"""Characters of one call."""
DEEPEST = 64
"""Levels of arguments and of schemas: they are walked by recursion in many places."""

ARGUMENTS: Mapping[Form, str] = {"hermes": "arguments", "llama": "parameters"}
"""The key of a call's arguments."""
_KEYS = tuple(ARGUMENTS.values())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ToolCall:
    """A call that a model asks for: a tool's name, and arguments as JSON has them, by name.

    Two are equal if their JSON is: 1, 1.0 and true are others to a template.
    """

    name: str
    arguments: Mapping[str, object]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCall) and self._written() == other._written()

    def __hash__(self) -> int:
        return hash(self._written())

    def _written(self) -> tuple[str, str]:
        try:
            return self.name, as_json(self.arguments)
        except RecursionError:  # No template shows them either.
            return self.name, ""

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
        tool_calls: calls of an assistant's message.
        name: name of the tool whose result this is.
        reasoning: thoughts of an assistant's message, apart from its text, as some templates want.

    Raises:
        EnvError: The role is unknown.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise EnvError(
                f"a message has the unknown role {self.role!r:.60}; "
                f"{nearest(str(self.role), ROLES)}"
            )

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.name is not None:
            fields["name"] = self.name
        if self.reasoning:  # Templates use different names for it.
            fields |= dict.fromkeys(REASONING, self.reasoning)
        return fields


def with_system(system: str, messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with this system message first, unless they begin with one."""
    is_first = bool(messages) and messages[0].role == "system"
    if not system or (is_first and messages[0].content):
        return messages
    return [Message("system", system), *messages[is_first:]]


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed text of a model.

    Attributes:
        content: the text without the calls that were read, stripped.
        calls: calls that were read, in order.
        problems: a sentence for the model about each call that could not be read.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def parse_tool_calls(text: str, form: Form) -> Parsed:
    """Read the calls in what a model's text says.

    >>> parse_tool_calls('{"name": "add", "parameters": {"a": 1}}', "llama").calls
    (ToolCall(name='add', arguments={'a': 1}),)
    >>> parse_tool_calls("<tool_call>add(1)</tool_call>", "hermes").problems
    ('a tool call is not JSON: Expecting value at character 0',)
    """
    calls: list[ToolCall] = []
    problems: list[str] = []
    content: list[str] = []
    at, places = 0, _places(text, form)
    for start, stop in islice(places, MOST_CALLS):
        try:
            calls.append(_call(text[start:stop], ARGUMENTS[form]))
            content.append(text[at:start])
            at = stop
        except ValueError as error:
            problems.append(f"a tool call {error}")
    if next(places, None) is not None:
        problems.append(f"only the first {MOST_CALLS} tool calls of a message are read")
    content.append(text[at:])
    return Parsed("".join(content).strip(), tuple(calls), tuple(problems))


def call_text(call: ToolCall, form: Form) -> str:
    """Return a call as a model writes it; `parse_tool_calls` reads it back."""
    body = as_json({"name": call.name, ARGUMENTS[form]: dict(call.arguments)})
    return f"{OPEN}\n{body}\n{CLOSE}" if form == "hermes" else body


def bytes_of(message: Message) -> int:
    """Estimate the size of a message in memory."""
    calls = (len(call.name) + len(as_json(call.arguments)) for call in message.tool_calls)
    return 200 + len(message.content) + len(message.reasoning) + 25 * sum(calls)


def as_json(value: object) -> str:
    r"""Return JSON as models read and write it: characters of other scripts are not escaped.

    >>> as_json({"city": "Köln", "half": "\ud83d"})
    '{"city": "Köln", "half": "\\ud83d"}'
    """
    text = json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair is not text for tokenizers or UTF-8.
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def is_deeper(value: object, most: int) -> bool:
    """Return whether JSON is nested more than `most` levels deep."""
    if not isinstance(value, dict | list):
        return False
    inner = cast("Collection[object]", value.values() if isinstance(value, dict) else value)
    return most == 0 or any(is_deeper(each, most - 1) for each in inner)


def _places(text: str, form: Form) -> Iterator[tuple[int, int]]:
    """Yield the places of calls in a text, except in thoughts."""
    find = _hermes if form == "hermes" else _llama
    for start, stop in said_spans(text):
        yield from find(text, start, stop)


def _hermes(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield calls up to the closing tag behind their JSON, or to the end without one."""
    while (start := text.find(OPEN, start, stop)) >= 0:
        body = start + len(OPEN)
        json_end = _json_end(text, body)
        close = text.find(CLOSE, json_end or body, stop)
        end = stop if close < 0 else close + len(CLOSE)
        # Behind a JSON that is whole, no tag belongs to an argument.
        other = -1 if json_end is None else text.find(OPEN, json_end, end)
        end = end if other < 0 else other
        yield start, end
        start = end


def _llama(text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield JSON values with semicolons or blanks between them; the last may be damaged."""
    at = _after(_LEAD, text, start)
    is_call = text.startswith("{", at)
    if is_call and PYTHON_TAG not in text[start:at]:
        value, _ = _json_at(text, at)
        is_call = not isinstance(value, dict) or _is_like_call(cast("dict[str, object]", value))
    while is_call and at < stop:
        end = _json_end(text, at) or stop
        at = _after(_BETWEEN, text, end)
        yield start, at
        start = at


def _is_like_call(fields: Mapping[str, object]) -> bool:
    return "name" in fields and (len(fields) == 1 or any(key in fields for key in _KEYS))


def _json_end(text: str, start: int) -> int | None:
    """Return the end of the JSON value that begins here; None if it is invalid or incomplete."""
    return _json_at(text, start)[1]


def _json_at(text: str, start: int) -> tuple[object, int | None]:
    start = _after(_BLANK, text, start)
    try:
        value, length = _LENIENT.raw_decode(text[start : start + LONGEST_CALL + 1])
    except (ValueError, RecursionError):
        return None, None
    return value, start + length


def _after(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return start if found is None else found.end()


_BLANK, _BETWEEN = re.compile(r"\s*"), re.compile(r"[;\s]*")
_LEAD = re.compile(rf"[;\s]*(?:{re.escape(PYTHON_TAG)}\s*)?")
_LENIENT = json.JSONDecoder(parse_float=len, parse_int=len)
"""A decoder that accepts numbers of any size."""


def _call(body: str, usual_key: str) -> ToolCall:
    if body.startswith(OPEN):
        if not body.endswith(CLOSE):
            raise ValueError(f"is not closed: {CLOSE} is missing")
        body = body[len(OPEN) : -len(CLOSE)]
    else:
        body = body[_after(_LEAD, body, 0) :].rstrip("; \t\r\n")
    body = body.strip()
    if len(body) > LONGEST_CALL:
        raise ValueError(f"has {len(body)} characters; at most {LONGEST_CALL} are read")
    found = strict_json(body)
    if is_deeper(found, DEEPEST):
        raise ValueError("is nested too deeply")
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    fields = cast("dict[str, object]", found)
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('has no "name", which must be the name of a tool')
    key = next((key for key in fields if key in _KEYS), usual_key)
    if others := fields.keys() - {"name", key}:
        other = as_json(min(others)[:60])
        raise ValueError(f'may have "name" and "{key}" alone, found {other} as well')
    arguments = fields.get(key, {})
    if isinstance(arguments, str):  # Some models quote the object.
        arguments = strict_json(arguments.strip() or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f'must have a JSON object as "{key}"')
    return ToolCall(name, cast("Mapping[str, object]", arguments))


@functools.lru_cache(16)
def has_response_template(tokenizer: Tokenizer) -> bool:
    """Return whether a response template reads turns; log a warning if one cannot."""
    if getattr(tokenizer, "response_template", None) is None:
        return False
    try:
        tokenizer.parse_response("Yes.", prefix="")
    except Exception as error:  # Response templates come with models, as code does.
        logger.warning(
            "the tokenizer's response template cannot be used, so tool calls are read only in the "
            "formats of Hermes and Llama (%.200s)",
            one_line(str(error)),
        )
        return False
    return True


def read_turn(
    tokenizer: Tokenizer,
    form: Form,
    prompt_T: Sequence[int],
    action: Action,
    *,
    text: str | None = None,
    opening: str = "",
    schemas: Sequence[Mapping[str, object]] = (),
) -> Parsed:
    """Read the calls and the content of a turn.

    Args:
        tokenizer: tokenizer of the model.
        form: form of calls that the response template does not read.
        prompt_T: the prompt of the turn.
        action: the turn.
        text: its text, if not the action's own.
        opening: the end of the prompt, if the turn begins with it.
        schemas: schemas of the tools; a response template reads arguments by them.
    """
    text = action.text if text is None else text
    opened = opened_thought(tokenizer, prompt_T)
    shown = opening + text
    whole = whole_turn(shown, opened)
    read = parse_tool_calls(whole, form)
    if whole != shown:
        read = dataclasses.replace(read, content=read.content.removeprefix(opened))
    if not has_response_template(tokenizer):
        return read
    own = text if action.text.startswith(text) else text.removeprefix(opened)
    said = spoken(whole_turn(opening + _marked(tokenizer, own, action), opened))
    prefix = str(tokenizer.decode(list(prompt_T))).removesuffix(opening) + THOUGHTS.get(opened, "")
    try:
        found = _by_template(tokenizer, said, prefix, schemas)
    except Exception as error:  # As above.
        problem = f"a tool call cannot be read: {one_line(str(error))[:200]}"
        return read if read.calls or not said else Parsed(read.content, (), (problem,))
    return found if found.calls or found.problems else read


def _marked(tokenizer: Tokenizer, text: str, action: Action) -> str:
    """Return an action's text, which a stop text may have cut, with special tokens."""
    texts, tokens_T = AnswerTexts(tokenizer), action.tokens_T
    whole = texts.text(tokens_T)
    if text == whole:
        return str(tokenizer.decode(list(tokens_T)))
    if not whole.startswith(text):
        return text
    lengths = range(len(tokens_T) + 1)
    count = bisect.bisect(lengths, len(text), key=lambda i: len(texts.text(tokens_T[:i]))) - 1
    begun_T = list(tokens_T[:count])
    return str(tokenizer.decode(begun_T)) + text[len(texts.text(begun_T)) :]


def _by_template(
    tokenizer: Tokenizer, said: str, prefix: str, schemas: Sequence[Mapping[str, object]]
) -> Parsed:
    """Parse by the response template: calls, checked as others are, and the text around them."""
    template = cast("Any", tokenizer).response_template
    fields = dict(template["fields"])
    if "join" not in fields.get("content", {"join": ""}):
        # By default only the last text is kept.
        fields["content"] = {**fields["content"], "repeats": True}
    found = cast(
        "Mapping[str, Any]",
        tokenizer.parse_response(
            said,
            schema={**template, "fields": fields},
            prefix=prefix,
            tools=[dict(each) for each in schemas],
        ),
    )
    bodies: list[str] = []
    for call in found.get("tool_calls") or ():
        called = call.get("function", call)
        arguments = called.get("arguments", called.get("parameters", {}))
        bodies.append(as_json({"name": called.get("name"), "arguments": arguments}))
    read = parse_tool_calls("".join(f"{OPEN}{body}{CLOSE}" for body in bodies), "hermes")
    content = Controls.of(tokenizer).pieces("".join(found.get("content") or ""))
    return Parsed("".join(list(content)[::2]).strip(), read.calls, read.problems)
