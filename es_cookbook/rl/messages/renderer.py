"""Messages as tokens, by the tokenizer's own chat template; what the model wrote stays as it was.

A chat template turns a whole chat into text. To use it after every turn would tokenize again what
the model wrote, and other tokens may come out than were sampled: the model would see a past that
never was. So the template is asked for two things alone: the prompt before the first turn, and what
is added after a turn, from its end to where the next begins. For the latter a chat is rendered in
which a sentinel stands for the turn, and the text behind the sentinel is taken. The chat's tokens
are then the prompt, the sampled tokens, what was added, the sampled tokens, and so on.

This equals what the template makes of the whole chat only where the template is prefix-extending: a
later message changes nothing before it. Some are not. Templates of thinking models drop what was
thought in earlier turns, others open a thought in the prompt that they do not show in the past. A
`Renderer` compares both once, when it is made, and refuses such a template, or with `keep_history`
takes what it adds after a turn and keeps all that the model wrote.

transformers renders chats and says nothing of prefixes; TRL's check of them is a package that few
who run this have installed.

A template that knows no system role gets the system message before the first user message, with a
blank line between them.
"""

import contextlib
import json
import sys
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import one_line
from es_cookbook.rl.messages.message import (
    Form,
    Message,
    ToolCall,
    call_text,
    parse_tool_calls,
)
from es_cookbook.rl.types import Action, Tokenizer

if TYPE_CHECKING:
    from _typeshed import TraceFunction

    from es_cookbook.rl.messages.tools import Tool, ToolSchema

ToolsIn: TypeAlias = Literal["template", "system", "nowhere"]
"""Where a model is told of its tools: by the chat template, in the system message, or nowhere."""

SENTINEL = "Turn7Sentinel"
_QUESTION = Message("user", "Question7Sentinel")
_RESULT = Message("tool", "Result7Sentinel", name="sentinel")
_MOST_CACHED = 4096
"""Of prompts, and of additions."""
_SPOKEN = SENTINEL, f"<think>\nThought7Sentinel\n</think>\n\n{SENTINEL}"
"""What a template is tried on: a plain turn, and one with a thought."""
PATIENCE = 5.0
"""Seconds for the first chat that a template renders; long ones take milliseconds."""
_tried: "weakref.WeakKeyDictionary[Tokenizer, object]" = weakref.WeakKeyDictionary()
"""Tokenizers -> the template that has rendered a chat in time."""


class Renderer:
    """Renders chats for one tokenizer and a set of tools.

    Args:
        tokenizer: with a chat template.
        tools: that the model may call.
        tools_in: where it is told of them. Not in the template: results are user messages.
        keep_history: accept a template that rewrites earlier turns; the tokens keep them.

    Raises:
        ModelError: There is no chat template, or it cannot be used so; says why.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: "Sequence[Tool | ToolSchema]" = (),
        *,
        tools_in: ToolsIn = "template",
        keep_history: bool = False,
    ) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer of {_name(tokenizer)} has no chat template, which chats need: use "
                "a model that was made for chats, or set the tokenizer's chat_template"
            )
        self.tokenizer = tokenizer
        self._schemas: list[dict[str, object] | Callable[..., object]] = []
        if tools_in == "template":
            self._schemas = [dict(tool.schema) for tool in tools]
        self._described = _described(tools) if tools_in == "system" else ""
        self._results_as_user = tools_in != "template"
        self._has_system = self._try_system()
        self._check_tools(tools)
        self._check_history(bool(tools), keep_history)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {i for i, token in added if token.special} | set(tokenizer.all_special_ids)
        self.end_of_turn = self._find_end_of_turn()

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a chat up to the model's first turn.

        Raises:
            ModelError: The template refuses it.
        """
        return self._prompt(tuple(messages))

    def added(self, action: Action, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between the model's turn and its next: its end, messages, the next's opening.

        The token by which the model ended its turn itself is not repeated.

        Raises:
            ModelError: The template refuses the messages.
        """
        tokens_T = self._added(tuple(messages))
        ended = action.stop_reason == "stop" and action.tokens_T[-1:]
        if ended and tokens_T and ended[0] in self._special:
            first = tokens_T[0]
            if ended[0] == first or first == self.end_of_turn:
                return tokens_T[1:]
        return tokens_T

    # A group's Envs begin alike, and many answer alike. Renderers live as long as the program.
    @lru_cache(_MOST_CACHED)  # noqa: B019
    def _prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._encoded(self._rendered(self._adapted(messages)))

    @lru_cache(_MOST_CACHED)  # noqa: B019
    def _added(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._encoded(self._text_added(messages))

    @cached_property
    def form(self) -> Form | None:
        """How the template writes calls, if in one of the forms that are read."""
        call = ToolCall("sentinel", {"x": 7})
        turn = Message("assistant", "", (call,))
        try:
            before = self._rendered([_QUESTION])
            text = self._rendered([_QUESTION, turn], open_turn=False)
        except ModelError:
            return None
        # As an action's text is: without special tokens.
        tokens = self._encoded(text.removeprefix(before))
        written = cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        forms: tuple[Form, ...] = ("hermes", "llama")
        return next((form for form in forms if call in parse_tool_calls(written, form).calls), None)

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the roles that the template knows."""
        adapted = self._in_roles(messages)
        system = [self._described] if self._described else []
        if adapted and adapted[0].role == "system":
            system.insert(0, adapted.pop(0).content)
        text = "\n\n".join(system)
        if not text:
            return adapted
        if self._has_system:
            return [Message("system", text), *adapted]
        for i, message in enumerate(adapted):
            if message.role == "user":
                adapted[i] = Message("user", f"{text}\n\n{message.content}")
                return adapted
        return [Message("user", text), *adapted]

    def _in_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Where the template has no tools, calls are text, and results one message of the user."""
        if not self._results_as_user:
            return list(messages)
        in_roles: list[Message] = []
        for is_result, run in groupby(messages, lambda message: message.role == "tool"):
            if is_result:
                in_roles.append(Message("user", "\n".join(result.content for result in run)))
                continue
            for message in run:
                calls = [call_text(call, "hermes") for call in message.tool_calls]
                content = "\n".join(filter(None, (message.content, *calls)))
                in_roles.append(Message(message.role, content))
        return in_roles

    def _text_added(self, messages: Sequence[Message]) -> str:
        chat = [_QUESTION, Message("assistant", SENTINEL), *self._in_roles(messages)]
        return self._rendered(chat).partition(SENTINEL)[2]

    def _rendered(self, messages: Sequence[Message], *, open_turn: bool = True) -> str:
        chat = [message.as_dict() for message in messages]
        return render_chat(self.tokenizer, chat, tools=self._schemas or None, open_turn=open_turn)

    def _encoded(self, text: str) -> tuple[int, ...]:
        # Half of a surrogate pair, which JSON can name, is no text for tokenizers.
        text = text.encode("utf-8", "replace").decode()
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _try_system(self) -> bool:
        text = "System7Sentinel"
        try:
            return text in self._rendered([Message("system", text), _QUESTION])
        except ModelError:
            return False

    def _check_tools(self, tools: "Sequence[Tool | ToolSchema]") -> None:
        if not self._schemas:
            return
        rendered = self._rendered([_QUESTION])
        unseen = [tool.name for tool in tools if tool.name not in rendered]
        why = f"does not show the tool {unseen[0]!r}" if unseen else ""
        try:
            if not why and _RESULT.content not in self._text_added([_RESULT]):
                why = "leaves out results of tools"
        except ModelError:
            why = "refuses results of tools"
        if why:
            raise self._unusable(
                f"{why}: set tools_in=system, which describes the tools in the system message and "
                "gives results as user messages"
            )

    def _check_history(self, with_results: bool, keep_history: bool) -> None:
        """Compare what is added turn by turn with what the template makes of the whole chat."""
        opening, question = self._rendered([_QUESTION]), self._text_added([_QUESTION])
        if _QUESTION.content not in question:
            raise self._unusable(
                "leaves out messages after a turn, or what a message says: it cannot be used for "
                "chats of text"
            )
        replies = [_QUESTION, *(self._in_roles([_RESULT]) if with_results else [])]
        for turn in () if keep_history else _SPOKEN:
            said = Message("assistant", turn)
            # Where the template has a blank before a turn, the model writes it.
            blank = self._rendered([_QUESTION, said]).removeprefix(opening).partition(turn)[0]
            written = turn if blank.strip() else blank + turn
            for reply in replies:
                whole = self._rendered([_QUESTION, said, reply, said, _QUESTION])
                if whole != written.join((opening, self._text_added([reply]), question)):
                    what = "an earlier turn" if turn == SENTINEL else "a thought of an earlier turn"
                    raise self._unusable(
                        f"rewrites {what} when messages follow, so the model would see other "
                        "tokens than it sampled: set keep_history=True, which keeps all turns as "
                        "they were sampled, or use a template that rewrites none"
                    )

    def _unusable(self, why: str) -> ModelError:
        return ModelError(f"the chat template of {_name(self.tokenizer)} {why}")

    def _find_end_of_turn(self) -> int | None:
        chat = [_QUESTION, Message("assistant", SENTINEL)]
        closing = self._encoded(self._rendered(chat, open_turn=False).partition(SENTINEL)[2])
        return closing[0] if closing and closing[0] in self._special else None


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: list[dict[str, object] | Callable[..., object]] | None = None,
    open_turn: bool = True,
) -> str:
    """A chat as text, by the tokenizer's own template.

    Raises:
        ModelError: The template fails, or does not come to an end with its first chat.
    """
    is_new = _tried.get(tokenizer) != tokenizer.chat_template
    # Not `TemplateError` alone: templates also add and index what is not there.
    try:
        with _deadline(PATIENCE) if is_new else contextlib.nullcontext():
            text = tokenizer.apply_chat_template(
                [cast("dict[str, str]", message) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=open_turn,
            )
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelError(
            f"the chat template of {_name(tokenizer)} cannot render messages of the roles {roles} "
            f"({one_line(said)})"
        ) from error
    _tried[tokenizer] = tokenizer.chat_template
    assert isinstance(text, str)
    return text


@contextlib.contextmanager
def _deadline(seconds: float) -> Generator[None]:
    """End Python code within that does not end by itself: a template is code of strangers."""
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


def _name(tokenizer: Tokenizer) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _described(tools: "Sequence[Tool | ToolSchema]") -> str:
    """A system message about tools, in the words of Hermes and Qwen."""
    if not tools:
        return ""
    lines = "\n".join(json.dumps(tool.schema) for tool in tools)
    return (
        "You may call these functions:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
