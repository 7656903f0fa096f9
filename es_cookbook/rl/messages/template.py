"""A chat as text and as tokens, by the tokenizer's own chat template, with all that it says.

Templates differ in what they know. Some have no system role and leave such a message out or refuse
it, some show the first system message alone, some leave out results of tools, some want turns to
alternate. So a chat is tried as it is, and then with as few changes as make the template show
everything (`shapes`). Nothing is left out in silence: if no change helps, the chat is refused.

Names of control tokens in messages are text, except in what the model itself has said (`encoder`).

A template may tell the date. It is always the same one (`DATE`), so the prompts of a run do not
depend on the day.
"""

import contextlib
import dataclasses
import json
import re
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import chain, combinations, groupby, takewhile, zip_longest
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import one_line
from es_cookbook.rl.messages.encoder import Controls, behind, framed
from es_cookbook.rl.messages.message import REASONING, Message, ToolCall, call_text
from es_cookbook.rl.messages.thoughts import TAGS, said_spans
from es_cookbook.rl.types import Tokenizer

if TYPE_CHECKING:
    from _typeshed import TraceFunction

Schema: TypeAlias = Mapping[str, object]
Change: TypeAlias = Callable[[Sequence[Message]], list[Message]]
"""Writes a chat in another way and leaves nothing out; pieces that are joined have a blank line
between them."""
T = TypeVar("T")
SENTINEL = "Turn7Sentinel"
QUESTION = Message("user", "Question7Sentinel")
ANSWERED = QUESTION, Message("assistant", SENTINEL)
PATIENCE = 5.0
"""Seconds for the first chat that a template renders; long ones take milliseconds."""
_FLAGS = re.compile(r"/(?:no_)?think\b")
"""Templates of some thinking models take these words out of what is said, and obey them."""
_tried: "weakref.WeakKeyDictionary[Tokenizer, object]" = weakref.WeakKeyDictionary()
"""Tokenizers -> the template that has rendered a chat in time."""
DATE = datetime(2026, 1, 1, 12)
"""The date that templates tell."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: tokenizer with a chat template.
        schemas: schemas of tools, passed to the template.
        calls_are_text: write calls and results of tools as text in any case.
    """

    def __init__(
        self, tokenizer: Tokenizer, schemas: Sequence[Schema] = (), *, calls_are_text: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.calls_are_text = calls_are_text
        self._controls = Controls.of(tokenizer)
        self._schemas = [self._shielded(dict(schema)) for schema in schemas] or None
        self._always: tuple[Change, ...] = (calls_as_text,) if calls_are_text else ()

    @staticmethod
    def of(tokenizer: Tokenizer) -> "ChatTemplate":
        """Return the template of a tokenizer without tools; cached."""
        return _template(tokenizer, str(tokenizer.chat_template))

    def tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a chat up to the assistant's turn.

        Raises:
            ModelError: As `text`.
        """
        return framed(self.tokenizer, self.text(messages))

    def text(
        self, messages: Sequence[Message], *, open_turn: bool = True, as_written: bool = False
    ) -> str:
        """Return a chat as text that `framed` encodes.

        Args:
            messages: all of them are shown.
            open_turn: up to the assistant's turn.
            as_written: names of control tokens are these tokens.

        Raises:
            ModelError: The template fails, or does not show a message in any form.
        """
        try:
            shown = messages if as_written else [self._safe(message) for message in messages]
            return self._complete(shown, messages, open_turn)
        except RecursionError as error:
            who = name_of(self.tokenizer)
            raise ModelError(f"a call is nested too deeply for the template of {who}") from error

    def turn(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant message after a prompt, as the template writes it.

        With all control tokens that end it, and without an end where there are none.

        Raises:
            ModelError: The template refuses it, or opens turns with what it does not begin with.
        """
        text = self.text([QUESTION, message], open_turn=False, as_written=True)
        pairs = zip_longest(self._opening, text)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(text))
        extra, said = self._opening[same:], text[same:]
        if extra.strip():
            said = self._said_behind(extra, message)
        if not self.ends_T:
            return behind(self.tokenizer, self._opening, said.removesuffix(self._closing))
        tokens_T = behind(self.tokenizer, self._opening, said)
        last = [at for at, token in enumerate(tokens_T, 1) if token in self._controls.ids]
        return tokens_T[: last[-1] if last else None]

    @cached_property
    def ends_T(self) -> tuple[int, ...]:
        """The control tokens that the template writes after a turn, ignoring blanks."""
        tokens_T = behind(self.tokenizer, SENTINEL, self._closing)
        return tuple(token for token in tokens_T if token in self._controls.ids)

    def raw(self, messages: Sequence[Message], *, open_turn: bool = True) -> str:
        """Return the template's text for the messages, unchanged.

        Raises:
            ModelError: It fails, or does not come to an end with its first chat.
        """
        tokenizer, more = self.tokenizer, dict[str, Any]()
        # Some tokenizers take no argument that they do not use.
        if "strftime_now" in str(tokenizer.chat_template):
            more["strftime_now"] = DATE.strftime
        is_new = _tried.get(tokenizer) != tokenizer.chat_template
        # Not `TemplateError` alone: templates also add and index what is not there.
        try:
            with _deadline(PATIENCE) if is_new else contextlib.nullcontext():
                text = tokenizer.apply_chat_template(
                    cast("list[dict[str, str]]", _as_dicts(messages)),
                    tools=cast("list[dict[str, object] | Callable[..., object]]", self._schemas),
                    tokenize=False,
                    add_generation_prompt=open_turn,
                    **more,
                )
        except RecursionError:
            raise
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            said = f"{type(error).__name__}: {str(error)[:200]}"
            raise ModelError(
                f"the chat template of {name_of(tokenizer)} cannot render messages of the roles "
                f"{roles} ({one_line(said)})"
            ) from error
        _tried[tokenizer] = tokenizer.chat_template
        assert isinstance(text, str)
        return text

    @cached_property
    def _opening(self) -> str:
        return self.raw([QUESTION])

    @cached_property
    def _closing(self) -> str:
        """The template's text after the last turn."""
        return self.raw(ANSWERED, open_turn=False).partition(SENTINEL)[2]

    def _said_behind(self, extra: str, message: Message) -> str:
        """Return the content and its end, if prompts end in a text that earlier turns lack."""
        content = message.content.lstrip()
        is_begun = content.startswith(extra.strip())
        has_tags = any(tag in extra for tag in TAGS)
        if message.tool_calls or message.reasoning or (has_tags and not is_begun):
            raise ModelError(
                f"the chat template of {name_of(self.tokenizer)} opens turns with {extra!r:.60}, "
                "with which an answer has to begin"
            )
        said = content[len(extra.strip()) :].lstrip("\n") if is_begun else message.content
        return said + self._closing

    def _safe(self, message: Message) -> Message:
        """Return a message with shielded names of control tokens, except tags of thoughts."""
        kept = TAGS if message.role == "assistant" else ()
        calls = (
            ToolCall(call.name, self._shielded(dict(call.arguments))) for call in message.tool_calls
        )
        return dataclasses.replace(
            message,
            content=self._controls.shielded(message.content, but=kept),
            name=message.name and self._controls.shielded(message.name),
            tool_calls=tuple(calls),
            reasoning=self._controls.shielded(message.reasoning),
        )

    def _shielded(self, value: T) -> T:
        """Return a JSON value with its texts shielded."""
        found: object = value
        if isinstance(value, str):
            found = self._controls.shielded(value)
        elif isinstance(value, list):
            found = [self._shielded(each) for each in cast("list[object]", value)]
        elif isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            found = {self._shielded(name): self._shielded(each) for name, each in fields.items()}
        return cast(T, found)

    def _complete(
        self, shown: Sequence[Message], messages: Sequence[Message], open_turn: bool
    ) -> str:
        """Return the text after the fewest changes that make the template show everything."""
        tried: list[Sequence[Message]] = []
        gap: tuple[int, str] | None = None
        failure: ModelError | None = None
        for changes in _SUBSETS:
            chat = shown
            for change in self._always + changes:
                chat = change(chat)
            if chat in tried:
                continue
            tried.append(chat)
            try:
                text = self.raw(chat, open_turn=open_turn)
            except ModelError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
                failure = failure or error
                continue
            if (gap := gap_in(shown, text)) is None:
                return text
        if gap is None and failure is not None:
            raise failure
        assert gap is not None
        at, what = gap
        message = messages[at]
        raise ModelError(
            f"the chat template of {name_of(self.tokenizer)} leaves out {what} of a message of "
            f"the role {message.role}: {message.content!r:.60}"
        )


@lru_cache(16)
def _template(tokenizer: Tokenizer, template: str) -> ChatTemplate:  # Another is tried anew.
    return ChatTemplate(tokenizer)


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Convert messages to dictionaries; calls get ids of nine letters, as Mistral requires."""
    dicts, waiting, number = list[dict[str, object]](), list[str](), 0
    for message in messages:
        fields = message.as_dict()
        if message.tool_calls and dicts and dicts[-1]["role"] != "assistant":
            waiting.clear()  # Calls that got no result get none later.
        for call in cast("list[dict[str, object]]", fields.get("tool_calls", [])):
            number += 1
            call["id"] = f"call{number:05}"
            waiting.append(str(call["id"]))
        if message.role == "tool" and waiting:
            fields["tool_call_id"] = waiting.pop(0)
        dicts.append(fields)
    return dicts


@contextlib.contextmanager
def _deadline(seconds: float) -> Generator[None]:
    """Interrupt the code inside after some seconds: a template is untrusted code."""
    end = time.monotonic() + seconds

    def look(frame: FrameType, event: str, argument: object) -> "TraceFunction":
        if time.monotonic() > end:
            raise TimeoutError(f"it does not end within {seconds:g} s")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def name_of(tokenizer: Tokenizer) -> str:
    """Return the name of a tokenizer for error messages."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls in the Hermes format, and the results of a turn as one user message."""
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
    """Join the leading system messages; put later ones into the next user message."""
    first = takewhile(lambda message: message.role == "system", messages)
    leading = [message.content for message in first]
    rest = no_system(messages[len(leading) :])
    return [Message("system", "\n\n".join(leading)), *rest] if leading else rest


def no_system(messages: Sequence[Message]) -> list[Message]:
    """Put system messages into the next user message, or a new one at the end."""
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
    """Join neighbouring messages of the same role, except results of tools."""
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


_CHANGES: tuple[Change, ...] = (calls_as_text, one_system, no_system, alternating)
_SUBSETS = [*chain.from_iterable(combinations(_CHANGES, n) for n in range(len(_CHANGES) + 1))]
"""Changes that are tried together, the fewest first."""


def gap_in(messages: Sequence[Message], text: str) -> tuple[int, str] | None:
    """Return the first message with a part that is missing in a text, and that part.

    Differences in blanks do not count, nor does the way JSON writes it.
    Only the spoken text of the assistant's messages has to be there, and only the last message's
    thoughts beside it: templates drop thoughts of earlier turns.
    """
    shown = _squeezed(text)
    for at, message in enumerate(messages):
        for what, said in _parts(message, is_last=at == len(messages) - 1):
            if _squeezed(said) not in shown and _squeezed(_escaped(said)) not in shown:
                return at, what
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


def _escaped(text: str) -> str:
    """Return the text as a JSON string, in which some templates show results of tools."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _squeezed(text: str) -> str:
    """Return the text with single blanks, because templates trim contents."""
    return " ".join(_FLAGS.sub("", text).split())
