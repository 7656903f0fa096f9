"""Chats as tokens, by the tokenizer's own chat template; the model's own tokens stay as they were.

A chat template turns a whole chat into text. If it were applied after every turn, the model's own
words would be tokenized again, and other tokens may come out than were sampled: the model would see
a past that never was. So a `Renderer` asks the template for two things only: the prompt before the
first turn, and what is added after a turn, from its end to where the next begins. For the latter a
chat is rendered in which a sentinel stands for the turn, and the text behind the sentinel is taken.
The chat's tokens are then the prompt, the sampled tokens, what was added, the sampled tokens, and
so on. Templates of thinking models drop earlier thoughts; here all turns stay as sampled.

`Chat` is what the rollouts of a problem share, `TokenStream` is one rollout's. The stream only
grows: an observation's tokens begin with all that was seen and sampled before, so an engine that
keeps the key-value cache of a rollout computes only what is new.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Generic, Literal, TypeAlias, TypeVar, cast

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EnvError, ModelError
from es_cookbook.common.terminal import plural
from es_cookbook.rl.messages.encoder import Controls, behind, framed, inside
from es_cookbook.rl.messages.message import (
    Form,
    Message,
    ToolCall,
    as_json,
    bytes_of,
    parse_tool_calls,
    read_turn,
    with_system,
)
from es_cookbook.rl.messages.template import ANSWERED, QUESTION, SENTINEL, ChatTemplate, name_of
from es_cookbook.rl.messages.tools import Tool, ToolSchema
from es_cookbook.rl.types import Action, Observation, Tokenizer

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
ToolsIn: TypeAlias = Literal["template", "system", "nowhere"]
"""Where the model sees its tools: in the chat template, in the system message, or nowhere."""

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
Limit: TypeAlias = Literal["turns", "context"]
"""The limit that ended a chat."""
MOST_TOKENS = 1 << 20
"""Most tokens that `KeptTurns` keeps: at most 40 bytes each, and 8 where chats go on."""
_TURN = 32
"""Overhead of a turn, in tokens."""


class Kept(Generic[K, V]):
    """Values by key; the least recently used go first. Threads may share it.

    >>> kept = Kept[str, str](most=10)
    >>> for name, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("d", 11)):
    ...     _ = kept.of(name, name.upper, lambda found: size)
    >>> [kept.get(name) for name in "abcd"], kept.size
    (['A', None, 'C', None], 8)

    Args:
        most: total size of all values, in the unit in which sizes are given.
    """

    def __init__(self, most: int) -> None:
        self._most, self.size = most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return Kept, (self._most,)

    def get(self, key: K) -> V | None:
        """Return the value; None if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def keep(self, key: K, value: V, size: int) -> None:
        """Keep a value, unless it alone is larger than `most`."""
        with self._lock:
            if key in self._values:
                self.size -= self._values.pop(key)[1]
            if size > self._most:
                return
            self._values[key] = value, size
            self.size += size
            while self.size > self._most:
                _, (_, gone) = self._values.popitem(last=False)
                self.size -= gone

    def of(self, key: K, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """Return the value; it is made if it is not kept."""
        found = self.get(key)
        if found is None:
            found = make()
            self.keep(key, found, size(found))
        return found


class Renderer:
    """Renders chats for one tokenizer and a set of tools.

    Args:
        tokenizer: tokenizer with a chat template.
        tools: tools that the model may call.
        tools_in: place of their schemas. Outside the template, results are user messages.

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
        tokenizer: Tokenizer, tools: Sequence[ToolSchema], *, reads_calls: bool = False
    ) -> "Renderer":
        """Make a renderer that shows tools by the template, or in the system message if it cannot.

        Args:
            tokenizer: with a chat template.
            tools: that the model may call.
            reads_calls: the template also writes calls in a form that is read.

        Raises:
            ModelError: As the class.
        """
        schemas = json.dumps([tool.schema for tool in tools])
        return _renderers.of(
            (tokenizer, str(tokenizer.chat_template), schemas, reads_calls),
            lambda: _best(tokenizer, schemas, reads_calls),
            lambda _: _A_RENDERER + _PARSED * len(schemas),
        )

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a chat up to the model's first turn.

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
        """Return the tokens between two turns of the model: end of turn, messages, next opening.

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
        """Return the prompt as text that `framed` encodes."""
        return self._template.text(self._with_tools(messages))

    def turn(self, message: Message) -> tuple[int, ...]:
        """Return the tokens of an assistant's message by the template, as `ChatTemplate.turn`.

        Raises:
            ModelError: The template refuses it.
        """
        return self._template.turn(message)

    @cached_property
    def form(self) -> Form | None:
        """The format in which the model writes calls; None if it is not supported."""
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
        """Return the messages, with the description of tools in the system message."""
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
        """Return the place after the first control token, if only blanks precede it; else 0."""
        for at, token in enumerate(tokens_T, 1):
            if token in self._special:
                return at
            if str(self.tokenizer.decode([token])).strip():
                break
        return 0


_Chat: TypeAlias = tuple[object, tuple[Message, ...]]
"""A renderer's `itself`, and messages."""
# A group's Envs begin alike, and many answer alike.
_prompts: Kept[_Chat, tuple[int, ...]] = Kept(_KEPT)
_additions: Kept[_Chat, tuple[int, ...]] = Kept(_KEPT)
_renderers: Kept[tuple[Tokenizer, str, str, bool], Renderer] = Kept(_KEPT)


def _bytes_of(chat: Sequence[Message], tokens_T: Sequence[int]) -> int:
    """Estimate the size of a chat and its tokens."""
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
    """Return a system message about tools, in the words of Hermes and Qwen."""
    if not tools:
        return ""
    lines = "\n".join(as_json(tool.schema) for tool in tools)
    return (
        "You may call these functions:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )


@chz.chz
class ChatOptions:
    """Options of chats of several turns."""

    system: str = chz.field(default="", doc="system message before the first; empty: none")
    max_turns: int = chz.field(default=8, doc="most turns of the model in a rollout")
    max_tokens: int | None = chz.field(default=None, doc="most tokens of a turn; None: by sampling")
    max_context: int | None = chz.field(
        default=None, doc="most tokens of a chat; None: the engine's"
    )
    stop: tuple[str, ...] = chz.field(default=(), doc="strings that end a turn")
    tools_in: ToolsIn = chz.field(
        default="template",
        doc="where the model is told of tools: by the chat template, in the system message, "
        "or nowhere",
    )
    form: Form | None = chz.field(
        default=None, doc="how the model writes calls: hermes or llama; None: as its template"
    )

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "max_turns", "max_tokens", "max_context", at_least=1)
        if not all(self.stop):
            raise ConfigError("stop must be strings with at least a character")


class Chat:
    """Shared by the chats of a data set: options, tools, and how messages become tokens.

    Args:
        tokenizer: tokenizer with a chat template.
        options: options of the chat.
        tools: tools that the model may call.

    Raises:
        ModelError: The tokenizer's chat template cannot be used so.
        ConfigError: It cannot be seen how the model writes calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ChatOptions | None = None,
        tools: Sequence[Tool | ToolSchema] = (),
    ) -> None:
        self.options = options or ChatOptions()
        self.tools = tuple(tools)
        self.renderer = _renderer(tokenizer, self.tools, tools_in=self.options.tools_in)
        self.form: Form = self._form() if tools else "hermes"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    def begin(self, messages: Sequence[Message], context_length: int) -> "TokenStream":
        """Begin a rollout whose prompt is these messages, after the system message.

        Raises:
            ModelError: The chat template refuses the messages.
            EnvError: They leave no room for a turn in `max_context`.
        """
        tokens_T = self.renderer.prompt(self.with_system(messages))
        most = self.options.max_context
        if most is not None and len(tokens_T) >= most:
            raise EnvError(
                f"a prompt of {plural(len(tokens_T), 'token')} leaves no room in "
                f"max_context={most}; shorten the prompt or raise max_context"
            )
        return self.stream(tokens_T, context_length)

    def with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, with the system message first if they have none."""
        return with_system(self.options.system, messages)

    def stream(self, tokens_T: tuple[int, ...], context_length: int) -> "TokenStream":
        """Begin a rollout that continues from these tokens."""
        most = min(context_length, self.options.max_context or context_length)
        return TokenStream(self, tokens_T, most)

    def _form(self) -> Form:
        if self.options.form is not None:
            return self.options.form
        if self.options.tools_in != "template":
            return "hermes"  # As the system message asks.
        found = self.renderer.form
        if found is None:
            raise ConfigError(
                "the chat template writes tool calls in a form that is not read: set form=hermes "
                "or form=llama if the model writes one of these, or tools_in=system, which asks "
                "for hermes"
            )
        return found


_renderer = functools.lru_cache(16)(Renderer)
"""One renderer for all rows of a data set, whose template is tried once."""


@dataclasses.dataclass(slots=True)
class TokenStream:
    """The tokens of one rollout, which only grow.

    Attributes:
        tokens_T: all tokens up to now.
        num_turns: number of turns that the model has taken.
    """

    chat: Chat
    tokens_T: tuple[int, ...]
    most: int
    num_turns: int = 0

    @property
    def observation(self) -> Observation:
        """The next observation of the model."""
        options, end = self.chat.options, self.chat.renderer.end_of_turn
        room = max(self.most - len(self.tokens_T), 1)
        return Observation(
            self.tokens_T,
            stop=options.stop,
            stop_token_ids=() if end is None else (end,),
            max_tokens=min(options.max_tokens or room, room),
        )

    def add(self, action: Action, messages: Sequence[Message]) -> Limit | None:
        """Add the model's turn and the messages after it; returns the limit if nothing fits."""
        self.num_turns += 1
        if self.num_turns >= self.chat.options.max_turns:
            return "turns"
        added_T = self.chat.renderer.added(action, messages)
        tokens_T = self.tokens_T + action.tokens_T + added_T
        if len(tokens_T) >= self.most:
            return "context"
        self.tokens_T = tokens_T
        return None


class KeptTurns:
    """Turns of chats whose clients send the whole chat with every request.

    A chat that goes on where a kept turn ended goes on from its tokens: so the model sees the
    tokens that it said, as in an Env, and an engine that has kept their keys and values runs what
    is new and nothing else. Any other chat is rendered as a whole.

    A chat is known by its messages; or by other names of them, where two that read alike are told
    apart. Kept are a digest of these, and the tokens of a turn.

    Args:
        beside: another model's turns, which share one limit with these.
    """

    def __init__(self, beside: "KeptTurns | None" = None) -> None:
        self._turns: Kept[tuple[object, object, bytes], tuple[tuple[int, ...], Action]]
        self._turns = Kept(MOST_TOKENS) if beside is None else beside._turns
        self._whose = object()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are kept."""
        return self._turns.size

    def keep(
        self,
        renderer: Renderer,
        names: Sequence[Hashable],
        tokens_T: tuple[int, ...],
        action: Action,
    ) -> None:
        """Keep the turn that a chat ends in, by its messages' names, and the tokens before it."""
        key, turn = self._key(renderer, names), Action(action.tokens_T, "", action.stop_reason)
        size = len(tokens_T) + len(action.tokens_T) + _TURN
        self._turns.keep(key, (tokens_T, turn), size)

    def prompt(
        self, renderer: Renderer, chat: Sequence[Message], names: Sequence[Hashable] | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a chat up to the model's next turn.

        By default the messages are their own names.

        Raises:
            ModelError: The template refuses it.
        """
        turns = [at for at, message in enumerate(chat, 1) if message.role == "assistant"]
        names = (chat if names is None else names)[: turns[-1]] if turns else ()
        known = None
        if names:
            with contextlib.suppress(RecursionError):  # The template refuses such a call.
                known = self._turns.get(self._key(renderer, names))
        if known is None:
            return renderer.prompt(chat)
        tokens_T, action = known
        return tokens_T + action.tokens_T + renderer.added(action, chat[turns[-1] :])

    def _key(self, renderer: Renderer, names: Sequence[Hashable]) -> tuple[object, object, bytes]:
        digest = hashlib.sha256()
        for name in names:
            digest.update(b"\n" + repr(name).encode())
        return self._whose, renderer.itself, digest.digest()
