"""Requests in the form of OpenAI's API, read: each is kept to the letter, or refused by its field.

A field is one that is kept, one that changes no answer (`_IDLE`), or refused with the status and
the JSON that the service itself gives. Nothing is ignored that a program may rely on.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import chz

from es_cookbook.common.checks import LEAST
from es_cookbook.common.errors import nearest
from es_cookbook.common.terminal import one_line
from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.rl.messages.message import Message, as_json
from es_cookbook.rl.messages.reading import UnreadMessageError, read_messages
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.types import SamplingParams

Json: TypeAlias = Mapping[str, Any]

_MOST_CHOICES = 128
_MOST_STOPS = 16
_IDLE = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields about accounts, caches and records."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Of chats and texts, the field and its values."""
_UNDESCRIBED: Mapping[str, str | Json] = {
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
"""What templates expect of every function."""


class RefusedRequest(Exception):
    """A request that is not answered, as OpenAI's service says so.

    Args:
        message: one sentence.
        status: of HTTP.
        param: the field that is wrong.
        code: by which programs tell causes.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            kind = "requests"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """How answers are drawn; None is left to the endpoint.

    Attributes:
        max_tokens: of an answer.
        temperature: 0 is greedy.
        top_p: nucleus sampling.
        stop: strings that end an answer, and are not in it; none where it is empty.
        seed: of the first answer.
        n: answers.
        logprobs: whether those of the tokens are asked for.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: bool = False

    def params(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters, these where nothing else is said."""
        said = {
            name: value
            for name in ("temperature", "top_p")
            if (value := getattr(self, name)) is not None
        }
        if self.logprobs:
            said["logprobs"] = True
        return chz.replace(sampling, **said) if said else sampling

    def seed_of(self, number: int) -> int | None:
        """The seed of an answer, if one is asked for."""
        return None if self.seed is None else (self.seed + number) & MAX_SEED


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    """What `/v1/chat/completions` is asked.

    Attributes:
        tools: of which the model is told.
        choice: whether it may call them, must, or which one it must: a name in quotes.
        one_call: at most one in an answer.
        stream: in pieces; with `usage` in a last one.
    """

    model: str
    messages: tuple[Message, ...]
    draw: Draw
    tools: tuple[ToolSchema, ...] = ()
    choice: str = "auto"
    one_call: bool = False
    stream: bool = False
    usage: bool = False

    @property
    def answers(self) -> int:
        """How many are asked for."""
        return self.draw.n


@dataclasses.dataclass(frozen=True, slots=True)
class TextRequest:
    """What `/v1/completions` is asked: a prompt is text or tokens.

    Attributes:
        echo: the text begins with the prompt, and log-probabilities with those of its tokens.
        tops: those of the most probable tokens are asked as well.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    draw: Draw
    stream: bool = False
    usage: bool = False
    echo: bool = False
    tops: bool = False

    @property
    def answers(self) -> int:
        """How many are asked for, to all prompts."""
        return self.draw.n * len(self.prompts)


def read_body(body: bytes) -> Json:
    """JSON's object.

    Raises:
        RefusedRequest: It is none.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(
            f"the body of the request is no JSON: {one_line(str(error))[:200]}"
        ) from error
    if not isinstance(found, dict):
        raise RefusedRequest("the body of the request must be a JSON object")
    return cast(Json, found)


def chat_request(body: Json) -> ChatRequest:
    """Read the body of `/v1/chat/completions`.

    Raises:
        RefusedRequest: Something of it cannot be kept.
    """
    fields = Fields(body)
    model = fields.text("model")
    messages = _messages(fields.take("messages", list))
    tools = _tools(fields.take("tools", list, []))
    choice = _choice(fields.take("tool_choice", (str, dict), "auto" if tools else "none"), tools)
    one_call = not fields.take("parallel_tool_calls", bool, True)
    most = fields.count("max_completion_tokens") or fields.count("max_tokens")
    logprobs = fields.take("logprobs", bool, False)
    draw = _draw(fields, most, logprobs)
    stream, usage = _stream(fields)
    fields.refuse_others()
    return ChatRequest(model, messages, draw, tools, choice, one_call, stream, usage)


def text_request(body: Json) -> TextRequest:
    """Read the body of `/v1/completions`. Raises as `chat_request`."""
    fields = Fields(body)
    model = fields.text("model")
    prompts = _prompts(fields.take("prompt", (str, list)))
    echo = fields.take("echo", bool, False)
    logprobs = fields.take("logprobs", int, None)
    if logprobs not in (None, 0, int(echo)):
        raise RefusedRequest(
            "logprobs must be 0, or 1 with echo=true: those of more tokens are not known",
            param="logprobs",
        )
    most = fields.count("max_tokens", least=int(not echo))
    draw = _draw(fields, 16 if most is None else most, logprobs is not None)
    stream, usage = _stream(fields)
    if echo and stream:
        raise RefusedRequest("echo goes with stream=false alone", param="echo")
    fields.refuse_others()
    return TextRequest(model, prompts, draw, stream, usage, echo, bool(logprobs))


class Fields:
    """A body's fields; each is taken once, and those that nobody takes are refused.

    Args:
        body: of the request.
        neutral: fields that are accepted with a value that changes nothing, which null always is.
    """

    def __init__(self, body: Json, neutral: Mapping[str, tuple[object, ...]] | None = None) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._neutral = _NEUTRAL if neutral is None else neutral

    def take(self, name: str, kind: type | tuple[type, ...], *default: object) -> Any:  # noqa: ANN401
        """A field of this type, or what stands for one that is not there."""
        found = self._left.pop(name, None)
        if found is None and default:
            return default[0]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        is_bool = isinstance(found, bool) and bool not in kinds
        if not isinstance(found, kinds) or is_bool:
            words = " or ".join(
                _WORDS[each] for each in kinds if each is not int or float not in kinds
            )
            what = "is missing" if found is None else f"is {_WORDS.get(type(found), 'null')}"
            raise RefusedRequest(f"{name} must be {words}, and {what}", param=name)
        return found

    def text(self, name: str) -> str:
        return self.take(name, str)

    def number(self, name: str, most: float) -> float | None:
        """0, or from the least that can be divided by to this."""
        found = self.take(name, (int, float), None)
        if found and not LEAST <= found <= most:
            least = f"0, or from {LEAST:g}" if 0 < found < LEAST else "from 0"
            raise RefusedRequest(
                f"{name} must be {least} to {most:g}, found {found!r:.60}", param=name
            )
        return None if found is None else float(found)

    def count(self, name: str, most: int = 1 << 31, least: int = 1) -> int | None:
        """From 1, or another least, to this."""
        found = self.take(name, int, None)
        if found is not None and not least <= found <= most:
            raise RefusedRequest(
                f"{name} must be from {least} to {most}, found {found}", param=name
            )
        return found

    def rest(self) -> Json:
        """What nobody has taken, without what changes nothing.

        Raises:
            RefusedRequest: A field cannot be kept.
        """
        for name, values in self._neutral.items():
            if self._left.pop(name, None) not in (None, *values):
                accepted = ", ".join(map(json.dumps, values)) or "null"
                raise RefusedRequest(
                    f"{name} cannot be kept here; accepted is {accepted}", param=name
                )
        return self._left

    def refuse_others(self) -> None:
        """Raise for a field that would change the answer."""
        for name in self.rest():
            if name not in _IDLE:
                raise RefusedRequest(f"unrecognized request argument: {name[:60]}", param=name)


_WORDS: Mapping[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
}


def _draw(fields: Fields, most: int | None, logprobs: bool) -> Draw:
    found = fields.take("stop", (str, list), None)
    stop = [found] if isinstance(found, str) else found or []
    if len(stop) > _MOST_STOPS or not all(isinstance(each, str) and each for each in stop):
        raise RefusedRequest(
            f"stop must be a string or up to {_MOST_STOPS}, each of a character or more",
            param="stop",
        )
    temperature, top_p = fields.number("temperature", 2), fields.number("top_p", 1)
    if top_p == 0:
        raise RefusedRequest("top_p must be above 0; greedy is temperature 0", param="top_p")
    return Draw(
        most,
        temperature,
        top_p,
        None if found is None else tuple(stop),
        fields.take("seed", int, None),
        fields.count("n", _MOST_CHOICES) or 1,
        logprobs,
    )


def _stream(fields: Fields) -> tuple[bool, bool]:
    stream = fields.take("stream", bool, False)
    options = cast("dict[str, object]", fields.take("stream_options", dict, {}))
    if options and not stream:
        raise RefusedRequest("stream_options go with stream=true alone", param="stream_options")
    return stream, bool(options.get("include_usage"))


def _prompts(found: str | list[object]) -> tuple[str | tuple[int, ...], ...]:
    def is_tokens(each: object) -> bool:
        return isinstance(each, list) and bool(each) and set(map(type, each)) == {int}

    if isinstance(found, str):
        return (found,)
    if is_tokens(found):
        return (tuple(cast("list[int]", found)),)
    if not found or not all(isinstance(each, str) or is_tokens(each) for each in found):
        raise RefusedRequest(
            "prompt must be a string, tokens, or an array of one of these", param="prompt"
        )
    return tuple(
        each if isinstance(each, str) else tuple(cast("list[int]", each)) for each in found
    )


def _tools(found: Sequence[object]) -> tuple[ToolSchema, ...]:
    tools = tuple(_tool(each, at) for at, each in enumerate(found))
    first = dict[str, int]()
    for at, tool in enumerate(tools):
        if (before := first.setdefault(tool.name, at)) < at:
            raise RefusedRequest(
                f"tools[{at}].function.name must be its own, and is {tool.name!r:.60} as in "
                f"tools[{before}]",
                param=f"tools[{at}].function.name",
            )
    return tools


def _tool(found: object, at: int) -> ToolSchema:
    where = f"tools[{at}]"
    tool = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RefusedRequest(f"{where} must be of type function and describe one", param=where)
    name = cast("dict[str, Any]", function).get("name")
    if not isinstance(name, str) or not name:
        raise RefusedRequest(f"{where}.function.name must be a string", param=where)
    shown = {key: value for key, value in function.items() if key != "strict" and value is not None}
    for key, value in _UNDESCRIBED.items():
        if not isinstance(shown.setdefault(key, value), type(value)):
            raise RefusedRequest(
                f"{where}.function.{key} must be {_WORDS[type(value)]}",
                param=f"{where}.function.{key}",
            )
    return ToolSchema(name, {"type": "function", "function": shown})


def _choice(found: str | Json, tools: Collection[ToolSchema]) -> str:
    names = [tool.name for tool in tools]
    if isinstance(found, str):
        if found not in ("auto", "none", "required"):
            raise RefusedRequest(
                f"tool_choice is unknown; {nearest(found, ('auto', 'none', 'required'))}",
                param="tool_choice",
            )
        if found == "required" and not tools:
            raise RefusedRequest("tool_choice=required needs tools", param="tool_choice")
        return found
    name = (found.get("function") or {}).get("name")
    if name not in names:
        raise RefusedRequest("tool_choice must name one of the tools", param="tool_choice")
    return as_json(name)


def _messages(found: Sequence[object]) -> tuple[Message, ...]:
    try:
        return read_messages(found)
    except UnreadMessageError as error:
        raise RefusedRequest(str(error), param=error.where) from error
