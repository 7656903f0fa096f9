"""Reads requests in the form of OpenAI's API; each field is honoured or refused by name.

Fields that change no answer are accepted (`_IDLE`). All others are refused with the status and the
JSON of OpenAI's service, so nothing that a program may rely on is ignored.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, cast

import chz

from es_cookbook.common.errors import nearest
from es_cookbook.common.files import check_values, strict_json
from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.rl.messages.message import Message, as_json
from es_cookbook.rl.messages.reading import (
    FieldError,
    JsonObject,
    function_of,
    read_messages,
    read_tools,
)
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.types import SamplingParams

Json: TypeAlias = Mapping[str, Any]

MOST_VALUES = 1 << 20
"""JSON values in a body: 512 prompts of 2,048 tokens. As Python objects they take up to 70 MB."""
LONGEST_STOPS = 2048
"""Total characters of a request's stop strings, with which each new token is compared."""
_IDLE = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Accepted fields about accounts, caches and records."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
"""Fields that are accepted with these values, which change nothing, or empty as all others are."""
_CHOICES = ("auto", "none", "required")


class RefusedRequest(Exception):
    """A request that is refused, in the form of OpenAI's service.

    Args:
        message: one sentence.
        status: HTTP status.
        param: the invalid field.
        code: identifies the cause for programs.
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
    """Sampling settings of answers; None leaves one to the endpoint.

    Attributes:
        max_tokens: limit on the tokens of an answer.
        temperature: 0 is greedy.
        top_p: nucleus sampling.
        stop: strings that end an answer, and are not part of it.
        seed: seed of the first answer.
        n: number of answers.
        logprobs: whether the tokens' log-probabilities are requested.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: bool = False

    def params(self, sampling: SamplingParams) -> SamplingParams:
        """Return sampling parameters, with `sampling` as defaults."""
        given = {"temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in given.items() if value is not None}
        return chz.replace(sampling, logprobs=self.logprobs or sampling.logprobs, **given)

    def seed_of(self, number: int) -> int | None:
        """Return the seed of an answer; None if the request has none."""
        return None if self.seed is None else (self.seed + number) & MAX_SEED


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to `/v1/chat/completions` or `/v1/responses`.

    Attributes:
        tools: the model may call.
        choice: "auto", "none", "required", or the quoted name of the tool that it must call.
        stream: whether to answer in pieces.
        usage: whether the last piece reports the usage.
    """

    model: str
    messages: tuple[Message, ...]
    draw: Draw
    tools: tuple[ToolSchema, ...] = ()
    choice: str = "auto"
    stream: bool = False
    usage: bool = False

    @property
    def answers(self) -> int:
        """Number of answers."""
        return self.draw.n


@dataclasses.dataclass(frozen=True, slots=True)
class TextRequest:
    """A request to `/v1/completions`; a prompt is text or tokens.

    Attributes:
        echo: the text begins with the prompt, and log-probabilities with those of its tokens.
        tops: whether the most probable tokens are requested as well.
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
        """Number of answers, to all prompts."""
        return self.draw.n * len(self.prompts)


def read_body(body: bytes) -> Json:
    """Read the JSON object of a body.

    Raises:
        RefusedRequest: It is not one, or holds too many values.
    """
    try:
        check_values(body, MOST_VALUES)
        found = strict_json(body.decode("utf-8-sig"), halves=False)
    except UnicodeDecodeError as error:
        raise RefusedRequest("the body of the request is no text in UTF-8") from error
    except ValueError as error:
        said = str(error).removeprefix("it ")
        raise RefusedRequest(f"the body of the request {said}") from error
    if not isinstance(found, dict):
        raise RefusedRequest("the body of the request must be a JSON object")
    return cast(Json, found)


def chat_request(body: Json) -> ChatRequest:
    """Read the body of `/v1/chat/completions`.

    Raises:
        FieldError: A field is invalid or not supported.
    """
    fields = JsonObject(body)
    messages = read_messages(fields.take("messages", list))
    most = fields.count("max_completion_tokens") or fields.count("max_tokens")
    return read_chat(fields, messages, most)


def read_chat(fields: JsonObject, messages: tuple[Message, ...], most: int | None) -> ChatRequest:
    """Read the rest of a body, given the messages and the limit `most` on tokens.

    Raises:
        FieldError: As `chat_request`.
    """
    model = fields.text("model")
    tools = read_tools(fields.each("tools"))
    choice = _choice(fields, tools)
    draw = _draw(fields, most, fields.take("logprobs", bool, False))
    stream, usage = _stream(fields)
    _refuse_others(fields)
    return ChatRequest(model, messages, draw, tools, choice, stream, usage)


def _refuse_others(fields: JsonObject) -> None:
    fields.unless_neutral(_NEUTRAL)
    fields.idle(*_IDLE)
    fields.only()


def text_request(body: Json) -> TextRequest:
    """Read the body of `/v1/completions`. Raises as `chat_request`."""
    fields = JsonObject(body)
    model = fields.text("model")
    prompts = _prompts(fields.take("prompt", (str, list)))
    echo = fields.take("echo", bool, False)
    logprobs = fields.take("logprobs", int, None)
    if logprobs not in (None, 0, int(echo)):
        raise FieldError(
            "logprobs", "must be 0, or 1 with echo=true: those of more tokens are not known"
        )
    most = fields.count("max_tokens", least=int(not echo))
    draw = _draw(fields, 16 if most is None else most, logprobs is not None)
    stream, usage = _stream(fields)
    if stream and (echo or logprobs is not None):
        raise FieldError("stream", "must be false with echo or logprobs")
    _refuse_others(fields)
    return TextRequest(model, prompts, draw, stream, usage, echo, bool(logprobs))


def _draw(fields: JsonObject, most: int | None, logprobs: bool) -> Draw:
    found = fields.take("stop", (str, list), None)
    stop = [found] if isinstance(found, str) else found or []
    if not all(isinstance(each, str) and each for each in stop):
        raise FieldError("stop", "must be a string or an array of strings, none of them empty")
    if (length := sum(map(len, stop))) > LONGEST_STOPS:
        raise FieldError("stop", f"must have up to {LONGEST_STOPS} characters, found {length}")
    temperature, top_p = fields.number("temperature", 2), fields.number("top_p", 1)
    if top_p == 0:
        raise FieldError("top_p", "must be above 0; greedy is temperature 0")
    seed, n = fields.take("seed", int, None), fields.count("n") or 1
    given = None if found is None else tuple(stop)
    return Draw(most, temperature, top_p, given, seed, n, logprobs)


def _stream(fields: JsonObject) -> tuple[bool, bool]:
    stream = fields.take("stream", bool, False)
    found = fields.take("stream_options", dict, None)
    options = JsonObject(found or {}, "stream_options")
    usage = options.take("include_usage", bool, False)
    options.take("include_obfuscation", bool, None)
    options.only()
    return stream, usage


def _prompts(found: str | list[object]) -> tuple[str | tuple[int, ...], ...]:
    def is_tokens(each: object) -> bool:
        return isinstance(each, list) and bool(each) and set(map(type, each)) == {int}

    if isinstance(found, str) or is_tokens(found):
        found = [found]
    if not found or not all(isinstance(each, str) or is_tokens(each) for each in found):
        raise FieldError("prompt", "must be a string, tokens, or an array of one of these")
    return tuple(
        each if isinstance(each, str) else tuple(cast("list[int]", each)) for each in found
    )


def _choice(fields: JsonObject, tools: Collection[ToolSchema]) -> str:
    found = fields.take("tool_choice", (str, dict), "auto" if tools else "none")
    if isinstance(found, str):
        if found not in _CHOICES:
            raise FieldError("tool_choice", f"is unknown; {nearest(found[:60], _CHOICES)}")
        if found == "required" and not tools:
            raise FieldError("tool_choice", "must be none or auto where there are no tools")
        return found
    choice = JsonObject(found, "tool_choice")
    function = function_of(choice)
    name = function.text("name")
    function.only()
    if name not in (tool.name for tool in tools):
        raise FieldError(function.at("name"), "must be that of one of the tools")
    return as_json(name)
