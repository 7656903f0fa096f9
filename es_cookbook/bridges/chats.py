"""Chats with tools that others describe, as JSON, and run themselves."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.tools import Tool
from es_cookbook.rl.types import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False, slots=True)  # Hashable, unlike its schema.
class Described:
    """A tool as a chat template is told of it.

    Attributes:
        schema: with the keys type and function.
    """

    name: str
    schema: Mapping[str, object]


def chat_with(tokenizer: Tokenizer, options: ChatOptions, tools: Sequence[Described]) -> Chat:
    """A chat whose model is told of these tools; it cannot run them.

    Raises:
        ModelError: As `Chat`.
        ConfigError: As `Chat`.
    """
    # A chat reads the names and schemas of tools, and no more.
    return Chat(tokenizer, options, cast("Sequence[Tool]", tools))
