"""Messages as tokens, by the tokenizer's own chat template; what the model wrote stays as it was.

A chat template turns a whole chat into text. To use it after every turn would tokenize again what
the model wrote, and other tokens may come out than were sampled: the model would see a past that
never was. So the template is asked for two things alone: the prompt before the first turn, and what
is added after a turn, from its end to where the next begins. For the latter a chat is rendered in
which a sentinel stands for the turn, and the text behind the sentinel is taken. The chat's tokens
are then the prompt, the sampled tokens, what was added, the sampled tokens, and so on.

Templates of thinking models drop what was thought in earlier turns; here all turns stay as sampled.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import ModelError
from es_cookbook.common.machine.kept import Kept
from es_cookbook.rl.messages.encoder import Controls, behind, framed, inside
from es_cookbook.rl.messages.message import (
    Form,
    Message,
    ToolCall,
    as_json,
    bytes_of,
    parse_tool_calls,
)
from es_cookbook.rl.messages.template import ANSWERED, QUESTION, SENTINEL, ChatTemplate, name_of
from es_cookbook.rl.messages.tools import Tool, ToolSchema
from es_cookbook.rl.messages.turns import read_turn
from es_cookbook.rl.types import Action, Tokenizer

ToolsIn: TypeAlias = Literal["template", "system", "nowhere"]
"""Where a model is told of its tools: by the chat template, in the system message, or nowhere."""

_RESULT = Message("tool", "Result7Sentinel", name="sentinel")
_TWICE = *ANSWERED, QUESTION
_SENTINEL = {
    "function": {"name": "sentinel", "parameters": {"properties": {"x": {"type": "integer"}}}}
}
_KEPT = 32 << 20
"""Bytes of prompts that are kept, of additions, and of renderers that requests ask for, each."""
_A_RENDERER = 100_000
"""Bytes that a renderer takes without tools."""
_PARSED = 50
"""Bytes that a character of its tools takes, which are Python's objects, twice."""


class Renderer:
    """Renders chats for one tokenizer and a set of tools.

    Args:
        tokenizer: with a chat template.
        tools: that the model may call.
        tools_in: where it is told of them. Not in the template: results are user messages.

    Attributes:
        itself: stands for it where it need not live on.

    Raises:
        ModelError: There is no chat template, or it cannot be used so; says why.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Tool | ToolSchema] = (),
        *,
        tools_in: ToolsIn = "template",
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {name_of(tokenizer)} has no chat template, which chats need: "
                "use a model that was made for chats, or set the tokenizer's chat_template"
            )
        self.tokenizer = tokenizer
        self.itself = object()  # Another one in each process.
        schemas = [tool.schema for tool in tools] if tools_in == "template" else []
        self._described = _described(tools) if tools_in == "system" else ""
        self._template = ChatTemplate(tokenizer, schemas, calls_are_text=tools_in != "template")
        self._special = Controls.of(tokenizer).ids
        if schemas:
            self._check_tools(tools)
        if QUESTION.content not in self._template.raw(_TWICE).partition(SENTINEL)[2]:
            raise self._unusable(
                "leaves out messages after a turn, or what a message says: it cannot be used for "
                "chats of text"
            )
        self.end_of_turn = next(iter(self._template.ends_T), None)

    @staticmethod
    def best(
        tokenizer: Tokenizer,
        tools: Sequence[ToolSchema],
        *,
        reads_calls: bool = False,
    ) -> "Renderer":
        """By the template if it shows these tools, or else in the system message.

        Args:
            tokenizer: with a chat template.
            tools: that the model may call.
            reads_calls: the template also writes calls in a form that is read.

        Raises:
            ModelError: As the class.
        """
        schemas = json.dumps([tool.schema for tool in tools])
        digest = hashlib.sha256(schemas.encode()).digest()
        return _renderers.of(
            (tokenizer, str(tokenizer.chat_template), digest, reads_calls),
            lambda: _best(tokenizer, schemas, reads_calls),
            lambda _: _A_RENDERER + _PARSED * len(schemas),
        )

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a chat up to the model's first turn.

        Raises:
            ModelError: The template refuses it.
        """
        chat = tuple(messages)
        return _prompts.of(
            (self.itself, chat),
            lambda: self._template.tokens(self._with_tools(chat)),
            partial(_bytes_of, chat),
        )

    def added(self, action: Action, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between the model's turn and its next: its end, messages, the next's opening.

        The token by which the model ended its turn itself is not repeated, nor is what the template
        has before it.

        Raises:
            ModelError: The template refuses the messages.
        """
        chat = tuple(messages)
        tokens_T = _additions.of(
            (self.itself, chat),
            lambda: behind(self.tokenizer, SENTINEL, self._text_added(chat)),
            partial(_bytes_of, chat),
        )
        ended = action.stop_reason == "stop" and action.tokens_T[-1:]
        if not ended or ended[0] not in self._special:
            return tokens_T
        ends_T = self._template.ends_T or ended
        num = ends_T.index(ended[0]) + 1 if ended[0] in ends_T else len(ends_T)
        for place in range(num):
            end = self._end_in(tokens_T)
            # The first may be another one than behind a last turn.
            is_first = place == 0 and bool(self._template.ends_T)
            if not end or not (is_first or tokens_T[end - 1] in ends_T):
                break
            tokens_T = tokens_T[end:]
        return tokens_T

    def text(self, messages: Sequence[Message]) -> str:
        """As `prompt`, as text that `framed` encodes."""
        return self._template.text(self._with_tools(messages))

    def turn(self, message: Message) -> tuple[int, ...]:
        """The tokens of the assistant's message as the template writes it; as `ChatTemplate.turn`.

        Raises:
            ModelError: The template refuses it.
        """
        return self._template.turn(message)

    @cached_property
    def form(self) -> Form | None:
        """How the model writes calls, if in one of the forms that are read."""
        if self._template.calls_are_text:
            return "hermes"  # As the system message asks.
        call = ToolCall("sentinel", {"x": 7})
        turn = Message("assistant", "", (call,))
        try:
            before = self._template.raw([QUESTION])
            text = self._template.raw([QUESTION, turn], open_turn=False)
        except ModelError:
            return None
        # As an action's text is: without special tokens.
        tokens = inside(self.tokenizer, text.removeprefix(before))
        written = cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        forms: tuple[Form, ...] = ("hermes", "llama")
        for form in forms:
            if call in parse_tool_calls(written, form).calls:
                return form
        given = framed(self.tokenizer, before), Action(tokens, written, "stop")
        read = read_turn(self.tokenizer, "hermes", *given, schemas=[_SENTINEL])
        return "hermes" if call in read.calls else None

    def _with_tools(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, and what the system says of tools behind its first message."""
        if not self._described:
            return messages
        system = [message.content for message in messages[:1] if message.role == "system"]
        described = Message("system", "\n\n".join([*system, self._described]))
        return [described, *messages[len(system) :]]

    def _text_added(self, messages: Sequence[Message]) -> str:
        shielded = Controls.of(self.tokenizer).shielded(SENTINEL)  # It may have a name in it.
        return self._template.text([*ANSWERED, *messages]).partition(shielded)[2]

    def _check_tools(self, tools: Sequence[Tool | ToolSchema]) -> None:
        rendered = self._template.raw([QUESTION])
        unseen = [tool.name for tool in tools if tool.name not in rendered]
        why = f"does not show the tool {unseen[0]!r}" if unseen else ""
        called = Message("assistant", "", (ToolCall(tools[0].name, {}),))
        try:
            if not why and _RESULT.content not in self._template.raw([QUESTION, called, _RESULT]):
                why = "leaves out results of tools"
        except ModelError:
            why = "refuses results of tools"
        if why:
            raise self._unusable(
                f"{why}: set tools_in=system, which describes the tools in the system message and "
                "gives results as user messages"
            )

    def _unusable(self, why: str) -> ModelError:
        return ModelError(f"the chat template of {name_of(self.tokenizer)} {why}")

    def _end_in(self, tokens_T: Sequence[int]) -> int:
        """Behind the first control token, if nothing but blanks is before it; else 0."""
        for at, token in enumerate(tokens_T, 1):
            if token in self._special:
                return at
            if str(self.tokenizer.decode([token])).strip():
                break
        return 0


_Chat: TypeAlias = tuple[object, tuple[Message, ...]]
"""What stands for a renderer, and messages."""
# A group's Envs begin alike, and many answer alike.
_prompts: Kept[_Chat, tuple[int, ...]] = Kept(_KEPT)
_additions: Kept[_Chat, tuple[int, ...]] = Kept(_KEPT)
_renderers: Kept[tuple[Tokenizer, str, bytes, bool], Renderer] = Kept(_KEPT)


def _bytes_of(chat: Sequence[Message], tokens_T: Sequence[int]) -> int:
    """About what a chat and its tokens take."""
    return 40 * len(tokens_T) + sum(map(bytes_of, chat))


def _best(tokenizer: Tokenizer, schemas: str, reads_calls: bool) -> Renderer:
    tools = [ToolSchema(each["function"]["name"], each) for each in json.loads(schemas)]
    try:
        renderer = Renderer(tokenizer, tools)
        if not tools or not reads_calls or renderer.form is not None:
            return renderer
    except ModelError:
        if not tools:
            raise
    return Renderer(tokenizer, tools, tools_in="system")


def _described(tools: Sequence[Tool | ToolSchema]) -> str:
    """A system message about tools, in the words of Hermes and Qwen."""
    if not tools:
        return ""
    lines = "\n".join(as_json(tool.schema) for tool in tools)
    return (
        "You may call these functions:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
