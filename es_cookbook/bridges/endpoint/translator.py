"""A chat as tokens, and what was sampled as a message: between OpenAI's API and an engine.

A program sends the whole chat with every request. Where it goes on from an answer that was given
before, the prompt is what was seen and sampled then, and what the template adds: so the model sees
the tokens that it said, as in an Env (`es_cookbook.rl.messages`), and an engine that has kept their
keys and values runs what is new and nothing else. Any other chat is rendered as a whole.
"""

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from es_cookbook.bridges.endpoint.requests import ChatRequest, Draw, RefusedRequest
from es_cookbook.common.errors import ModelError
from es_cookbook.rl.messages.message import (
    ARGUMENTS,
    OPEN,
    Form,
    Message,
    ToolCall,
    parse_tool_calls,
)
from es_cookbook.rl.messages.renderer import Renderer
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.types import Action, Observation, Tokenizer

_MOST_RENDERERS, _MOST_SAID = 64, 4096
_Key: TypeAlias = tuple[str, tuple[Message, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """What is sampled from.

    Attributes:
        tokens_T: all of it.
        opening: what the answer begins with, and is in the tokens already.
        stop_token_ids: end an answer, beside the model's own.
        form: how calls are written; None where none are read.
    """

    tokens_T: tuple[int, ...]
    opening: str = ""
    stop_token_ids: tuple[int, ...] = ()
    form: Form | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled, read.

    Attributes:
        content: its text without calls, up to a stop string.
        calls: of tools.
        finish: why it ended, in OpenAI's word.
        action: as it was sampled.
    """

    content: str
    calls: tuple[ToolCall, ...]
    finish: str
    action: Action


class Said:
    """Answers that were given, by the chat up to each: the tokens of both."""

    def __init__(self) -> None:
        self._of: OrderedDict[_Key, tuple[tuple[int, ...], Action]] = OrderedDict()

    def keep(self, request: ChatRequest, prompt: Prompt, answer: Answer) -> None:
        """Remember an answer, unless its beginning was given: then it was not sampled."""
        if not prompt.opening:
            turn = Message("assistant", answer.content, answer.calls)
            self._of[_key(request.tools, (*request.messages, turn))] = (
                prompt.tokens_T,
                answer.action,
            )
            while len(self._of) > _MOST_SAID:
                self._of.popitem(last=False)

    def find(
        self, tools: Sequence[ToolSchema], messages: tuple[Message, ...]
    ) -> tuple[tuple[int, ...], Action] | None:
        """The tokens before the answer that this chat ends in, and it."""
        return self._of.get(_key(tools, messages))


def _key(tools: Sequence[ToolSchema], messages: tuple[Message, ...]) -> _Key:
    return _described(tools), messages


def _described(tools: Sequence[ToolSchema]) -> str:
    return json.dumps([tool.schema for tool in tools])


class Translator:
    """Translates for one tokenizer.

    Args:
        tokenizer: without a chat template, texts alone are answered.
        context_length: of the engine, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._renderers: OrderedDict[str, tuple[Renderer, Form]] = OrderedDict()

    def of_chat(self, request: ChatRequest, said: Said) -> Prompt:
        """A chat's prompt.

        Raises:
            RefusedRequest: The chat template refuses the messages.
        """
        shown = () if request.choice == "none" else request.tools
        try:
            renderer, form = self._renderer(shown)
            tokens_T = self._tokens(renderer, request.messages, said, request.tools)
        except ModelError as error:
            raise RefusedRequest(str(error), param="messages") from error
        opening = _opening(request.choice, form)
        if opening:
            tokens_T += tuple(self.tokenizer.encode(opening, add_special_tokens=False))
        end = renderer.end_of_turn
        ends = () if end is None else (end,)
        return Prompt(tokens_T, opening, ends, form if shown else None)

    def of_text(self, prompt: str | tuple[int, ...]) -> Prompt:
        """A text's, as the tokenizer begins texts; or tokens as they are.

        Raises:
            RefusedRequest: No token, or one that there is not.
        """
        tokens_T = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        if not tokens_T or not all(0 <= token < len(self.tokenizer) for token in tokens_T):
            raise RefusedRequest(
                f"prompt must have at least one token, each below {len(self.tokenizer)}",
                param="prompt",
            )
        return Prompt(tokens_T)

    def observation(self, prompt: Prompt, draw: Draw) -> Observation:
        """What an engine is asked.

        Raises:
            RefusedRequest: The context is too short for it.
        """
        length, room = len(prompt.tokens_T), self.context_length - len(prompt.tokens_T)
        if room < (draw.max_tokens or 1):
            answer = f" and {draw.max_tokens} of the answer" if draw.max_tokens else ""
            raise RefusedRequest(
                f"the context has {self.context_length} tokens, fewer than {length} of the "
                f"prompt{answer}; shorten the messages or lower max_tokens",
                param="messages",
                code="context_length_exceeded",
            )
        return Observation(
            prompt.tokens_T,
            stop=draw.stop,
            stop_token_ids=prompt.stop_token_ids,
            max_tokens=draw.max_tokens or room,
        )

    def answer(self, prompt: Prompt, draw: Draw, action: Action, one_call: bool = False) -> Answer:
        """What was sampled, read; calls that cannot be read stay text."""
        text = prompt.opening + action.text
        ends = [at for stop in draw.stop if (at := text.find(stop, len(prompt.opening))) >= 0]
        text = text[: min(ends, default=len(text))]
        parsed = parse_tool_calls(text, prompt.form) if prompt.form else None
        if parsed is None or not parsed.calls or parsed.problems:
            return Answer(text, (), action.stop_reason, action)
        calls = parsed.calls[:1] if one_call else parsed.calls
        return Answer(parsed.content, calls, "tool_calls", action)

    def _tokens(
        self,
        renderer: Renderer,
        messages: tuple[Message, ...],
        said: Said,
        tools: Sequence[ToolSchema],
    ) -> tuple[int, ...]:
        turns = [at for at, message in enumerate(messages) if message.role == "assistant"]
        if turns:
            before, after = messages[: turns[-1] + 1], messages[turns[-1] + 1 :]
            if (known := said.find(tools, before)) is not None:
                tokens_T, action = known
                return tokens_T + action.tokens_T + renderer.added(action, after)
        return renderer.prompt(messages)

    def _renderer(self, tools: Sequence[ToolSchema]) -> tuple[Renderer, Form]:
        """By the template if it shows these tools, or else in the system message."""
        key = _described(tools)
        if key not in self._renderers:
            if len(self._renderers) >= _MOST_RENDERERS:
                self._renderers.popitem(last=False)
            self._renderers[key] = self._made(tools)
        return self._renderers[key]

    def _made(self, tools: Sequence[ToolSchema]) -> tuple[Renderer, Form]:
        try:
            renderer = Renderer(self.tokenizer, tools, keep_history=True)
            if not tools or renderer.form is not None:
                return renderer, renderer.form or "hermes"
        except ModelError:
            if not tools:
                raise
        return Renderer(self.tokenizer, tools, tools_in="system", keep_history=True), "hermes"


def _opening(choice: str, form: Form) -> str:
    """What an answer has to begin with in order to call a tool, or this one."""
    if choice in ("auto", "none"):
        return ""
    call = '{"name": ' if form == "llama" else f'{OPEN}\n{{"name": '
    return call + ('"' if choice == "required" else f'{choice}, "{ARGUMENTS[form]}": ')
