"""Chat messages and tool calls, as values.

They follow the dictionaries of `apply_chat_template` in transformers, which `as_dict` gives.
"""

import dataclasses
from collections.abc import Mapping

from es_cookbook.common.errors import EnvError, nearest

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for: a tool's name, and arguments as JSON has them, by name."""

    name: str
    arguments: Mapping[str, object]

    def __hash__(self) -> int:
        """By the name alone: arguments are JSON, and have no hash."""
        return hash(self.name)

    def as_dict(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    >>> Message("tool", "42", name="calculate").as_dict()
    {'role': 'tool', 'content': '42', 'name': 'calculate'}

    Attributes:
        role: one of `ROLES`.
        content: its text.
        tool_calls: what an assistant's message calls.
        name: of the tool whose result this is.

    Raises:
        EnvError: An unknown role, or a content that is no text.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise EnvError(
                f"a message has the unknown role {self.role!r:.60}; "
                f"{nearest(str(self.role), ROLES)}"
            )
        if not isinstance(self.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise EnvError(
                f"the content of a message must be text, found {type(self.content).__name__} in "
                f"the role {self.role!r}"
            )

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.name is not None:
            fields["name"] = self.name
        return fields
