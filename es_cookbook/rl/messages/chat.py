"""How a chat goes, and the tokens of one: the prompt, sampled turns, and what stands between.

`Chat` is what the rollouts of a problem share, `TokenStream` is one rollout's. The stream only
grows: an observation's tokens begin with all that was seen and sampled before, so an engine that
keeps the key-value cache of a rollout computes what is new and nothing else.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.machine.kept import Kept
from es_cookbook.common.terminal import plural
from es_cookbook.rl.messages.message import Form, Message, with_system
from es_cookbook.rl.messages.renderer import Renderer, ToolsIn
from es_cookbook.rl.messages.tools import Tool, ToolSchema
from es_cookbook.rl.types import Action, Observation, Tokenizer

Limit: TypeAlias = Literal["turns", "context"]
"""What ended a chat that was not over."""
MOST_TOKENS = 1 << 20
"""That are kept of chats which others hold: at most 40 bytes each, and 8 where chats go on."""
_TURN = 32
"""What a turn takes besides its tokens, in tokens."""


@chz.chz
class ChatOptions:
    """How a chat of many turns goes."""

    system: str = chz.field(default="", doc="system message before the first; empty: none")
    max_turns: int = chz.field(default=8, doc="most turns of the model in a rollout")
    max_tokens: int | None = chz.field(
        default=None, doc="most tokens of a turn; None: as many as sampling allows"
    )
    max_context: int | None = chz.field(
        default=None, doc="most tokens of the whole chat; None: the engine's context"
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
    """What the chats of a data set share: options, tools, and how messages become tokens.

    Args:
        tokenizer: with a chat template.
        options: how a chat goes.
        tools: that the model may call.

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
        """The tokens of a new rollout, whose prompt is these messages and the system message.

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
        """The messages, and the system message before them, if there is one that they lack."""
        return with_system(self.options.system, messages)

    def stream(self, tokens_T: tuple[int, ...], context_length: int) -> "TokenStream":
        """A rollout that stands at these tokens."""
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
"""One for all rows of a data set, whose template is tried once."""


@dataclasses.dataclass(slots=True)
class TokenStream:
    """The tokens of one rollout, which only grow.

    Attributes:
        tokens_T: all up to now.
        num_turns: that the model has taken.
    """

    chat: Chat
    tokens_T: tuple[int, ...]
    most: int
    num_turns: int = 0

    @property
    def observation(self) -> Observation:
        """What the model sees next."""
        options, end = self.chat.options, self.chat.renderer.end_of_turn
        room = max(self.most - len(self.tokens_T), 1)
        return Observation(
            self.tokens_T,
            stop=options.stop,
            stop_token_ids=() if end is None else (end,),
            max_tokens=min(options.max_tokens or room, room),
        )

    def add(self, action: Action, messages: Sequence[Message]) -> Limit | None:
        """The model's turn, as it was sampled, and what follows it; or why nothing more fits."""
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
    """Turns of chats that others hold, and hand over whole whenever they ask for the next one.

    A chat that goes on where a kept turn ended goes on from its tokens: so the model sees the
    tokens that it said, as in an Env, and an engine that has kept their keys and values runs what
    is new and nothing else. Any other chat is rendered as a whole.

    A chat is known by its messages; or by other names of them, where two that read alike are told
    apart. Of these a digest is kept, and of a turn its tokens.

    Args:
        beside: of another model, with whose turns these are limited together.
    """

    def __init__(self, beside: "KeptTurns | None" = None) -> None:
        self._turns: Kept[tuple[object, object, bytes], tuple[tuple[int, ...], Action]]
        self._turns = Kept(MOST_TOKENS) if beside is None else beside._turns
        self._whose = object()

    @property
    def num_tokens(self) -> int:
        """That are kept."""
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
        self,
        renderer: Renderer,
        chat: Sequence[Message],
        names: Sequence[Hashable] | None = None,
    ) -> tuple[int, ...]:
        """The tokens of a chat up to the model's next turn; its messages are their own names.

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
