"""Translates between OpenAI's API and an engine: chats to tokens, sampled tokens to messages.

A program sends the whole chat with every request; the prompt continues from the tokens of earlier
answers (`KeptTurns`).
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import plural
from es_cookbook.engines.base import Top
from es_cookbook.plugins.endpoint.requests import ChatRequest, Draw, RefusedRequest
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.chat import KeptTurns, Renderer
from es_cookbook.rl.messages.encoder import inside, plain
from es_cookbook.rl.messages.message import (
    ARGUMENTS,
    OPEN,
    Form,
    Message,
    ToolCall,
    as_json,
    read_turn,
)
from es_cookbook.rl.messages.thoughts import closed_turn, opened_thought
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.types import Action, Observation, Tokenizer

_LEAST = 16
"""Characters that a token may have in any vocabulary."""
_CUT = "\ufffd"
"""Decoded from tokens that end within a character."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        tokens_T: all of its tokens.
        opening: text that the answer begins with, which the tokens already have.
        form: format of tool calls; None if none are read.
        renderer: renderer of the chat; None for a text.
        tools: tools that the model may call.
    """

    tokens_T: tuple[int, ...]
    opening: str = ""
    form: Form | None = None
    renderer: Renderer | None = None
    tools: Sequence[ToolSchema] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer.

    Attributes:
        content: its text without calls, up to a stop string.
        calls: tool calls.
        finish: why it ended, in OpenAI's terms: `length` if it was cut, also after a call.
        action: the sampled action.
        tops: top tokens at the prompt's tokens after the first and the sampled ones, if requested.
    """

    content: str
    calls: tuple[ToolCall, ...]
    finish: str
    action: Action
    tops: Sequence[Top] | None = None

    @property
    def turn(self) -> Message:
        """The answer as a message of the chat."""
        return Message("assistant", self.content, self.calls)


class StreamedText:
    """The beginning of an answer's text that cannot change any more.

    Held back are as many characters as a stop string may have begun with, and an incomplete
    character; everything, if calls of tools are read. A token is decoded with the few before it, so
    an answer takes time in proportion to its length.

    Attributes:
        told: characters returned so far.
    """

    def __init__(self, texts: AnswerTexts, prompt: Prompt, draw: Draw) -> None:
        self._texts, self._prompt = texts, prompt
        self._stops = draw.stop or ()
        self._held = max(map(len, self._stops), default=1) - 1
        self._text = prompt.opening  # of the opening and the first `_read` tokens
        self._start = self._read = 0  # decoded together from `_start` on
        self.told = 0

    def more(self, tokens_T: Sequence[int]) -> str:
        """Return the text that these tokens, which are all so far, add to it."""
        if self._prompt.form is not None:
            return ""
        text = self._decoded(tokens_T).rstrip(_CUT)
        since = max(self.told, len(self._prompt.opening))  # A stop string is only sampled.
        found = [at for stop in self._stops if (at := text.find(stop, since)) >= 0]
        certain = max(self.told, min([len(text) - self._held, *found]))
        new = text[self.told : certain]
        self.told += len(new)
        return new

    def _decoded(self, tokens_T: Sequence[int]) -> str:
        known, text = (
            self._texts.text(each)
            for each in (tokens_T[self._start : self._read], tokens_T[self._start :])
        )
        if not text.startswith(known):  # It depends on earlier tokens.
            self._text, self._start, self._read = self._prompt.opening, 0, 0
            return self._decoded(tokens_T)
        whole = self._text + text[len(known) :]
        if len(text) > len(known) and not text.endswith(_CUT):
            self._text, self._start, self._read = whole, self._read, len(tokens_T)
        return whole


class Translator:
    """Translates for one tokenizer.

    Args:
        tokenizer: if it has no chat template, only texts are answered.
        context_length: context length of the engine, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self.tokenizer = tokenizer
        self.texts = AnswerTexts(tokenizer)
        self.context_length = context_length

    def of_chat(self, request: ChatRequest, kept: KeptTurns) -> Prompt:
        """Return a chat's prompt.

        Raises:
            RefusedRequest: The chat template refuses the messages.
        """
        self._check_fits(_texts(request), "messages")
        try:
            renderer = Renderer.best(self.tokenizer, request.tools, reads_calls=True)
            tokens_T = kept.prompt(renderer, request.messages)
        except ModelError as error:
            raise RefusedRequest(str(error), param="messages") from error
        form = renderer.form or "hermes"
        opening = _opening(request.choice, form)
        if opening:
            opened = opened_thought(self.tokenizer, tokens_T)
            tokens_T += inside(self.tokenizer, closed_turn(opening, opened))
        is_read = request.tools and request.choice != "none"
        return Prompt(tokens_T, opening, form if is_read else None, renderer, request.tools)

    def of_text(self, prompt: str | tuple[int, ...]) -> Prompt:
        """Return the prompt of a text, encoded with control tokens; or of tokens as they are.

        Raises:
            RefusedRequest: It has no token, an unknown one, or is far too long.
        """
        if isinstance(prompt, str):
            self._check_fits([prompt], "prompt")
            tokens_T = plain(self.tokenizer, prompt)
        else:
            tokens_T = prompt
        unknown = next((token for token in tokens_T if token not in self._known), None)
        if not tokens_T or unknown is not None:
            found = "none" if unknown is None else f"{unknown!r:.60}"
            raise RefusedRequest(
                f"prompt must have at least one token, each of them one of the "
                f"{len(self._known)} that the tokenizer knows, found {found}",
                param="prompt",
            )
        return Prompt(tokens_T)

    @functools.cached_property
    def _known(self) -> frozenset[int]:
        """Ids of all tokens; they may have gaps."""
        return frozenset(self.tokenizer.get_vocab().values())

    def _check_fits(self, texts: Iterable[str], param: str) -> None:
        """Refuse texts that cannot fit into the context, before they are encoded or rendered.

        Raises:
            RefusedRequest: They have more characters than the longest tokens of a context, or are
                more texts than it has tokens.
        """
        lengths = [len(text) for text in texts if text]
        length, context = sum(lengths), self.context_length
        if len(lengths) <= context and length <= self._longest * context:
            return
        what = "the prompt" if param == "prompt" else "the messages, or descriptions of tools"
        raise RefusedRequest(
            f"the context has {context} tokens, fewer than {plural(len(lengths), 'text')} of "
            f"{length} characters come to; shorten {what}",
            param=param,
            code="context_length_exceeded",
        )

    @functools.cached_property
    def _longest(self) -> int:
        """Maximum characters of a token, with a margin for characters that a tokenizer drops."""
        return max(_LEAST, *map(len, self.tokenizer.get_vocab()))

    def observation(self, prompt: Prompt, draw: Draw) -> Observation:
        """Return the observation for an engine.

        Raises:
            RefusedRequest: The context is too short.
        """
        length, room = len(prompt.tokens_T), self.context_length - len(prompt.tokens_T)
        if room < (1 if draw.max_tokens is None else draw.max_tokens):
            answer = f" and {draw.max_tokens} of the answer" if draw.max_tokens else ""
            raise RefusedRequest(
                f"the context has {self.context_length} tokens, fewer than {length} of the "
                f"prompt{answer}; shorten the messages or lower max_tokens",
                param="messages",
                code="context_length_exceeded",
            )
        end = prompt.renderer and prompt.renderer.end_of_turn
        return Observation(
            prompt.tokens_T,
            stop=draw.stop or (),
            stop_token_ids=() if end is None else (end,),
            max_tokens=draw.max_tokens or room,
        )

    def answer(self, prompt: Prompt, draw: Draw, action: Action) -> Answer:
        """Parse what was sampled; thoughts, and calls that cannot be parsed, stay text."""
        sampled = self.texts.before(draw.stop or (), action.text)
        text = prompt.opening + sampled
        if prompt.form is None:
            return Answer(text, (), action.stop_reason, action)
        parsed = read_turn(
            self.tokenizer,
            prompt.form,
            prompt.tokens_T,
            action,
            text=sampled,
            opening=prompt.opening,
            schemas=[tool.schema for tool in prompt.tools],
        )
        if not parsed.calls:
            return Answer(text, (), action.stop_reason, action)
        # An answer that was cut counts as cut, also after a call.
        finish = "length" if action.stop_reason == "length" else "tool_calls"
        return Answer(parsed.content, parsed.calls, finish, action)


def _texts(request: ChatRequest) -> Iterator[str]:
    """Yield all texts of a chat."""
    yield from (as_json(tool.schema) for tool in request.tools)
    for message in request.messages:
        yield from (message.content, message.reasoning)
        yield from (as_json(call.arguments) for call in message.tool_calls)


def _opening(choice: str, form: Form) -> str:
    """Return the text with which an answer must begin to call a tool, or a certain one."""
    if choice in ("auto", "none"):
        return ""
    call = '{"name": ' if form == "llama" else f'{OPEN}\n{{"name": '
    return call + ('"' if choice == "required" else f'{choice}, "{ARGUMENTS[form]}": ')
