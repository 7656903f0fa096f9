"""Messages as JSON has them, in rows and in requests: all that a message says, or a refusal.

Read are `role` and `content`, of the assistant `tool_calls` and what it thought, of a tool
`tool_call_id` and `name`. A content is text, or parts of text, a line each. Any other field that
has a value is refused by its name: a field that nobody reads changes what its writer meant.
`developer` is the system's role under a newer name.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, cast

from es_cookbook.common.errors import DataError, nearest
from es_cookbook.rl.messages.message import REASONING, ROLES, Message, ToolCall

Json: TypeAlias = Mapping[str, object]

_ROLES = {"developer": "system", **{role: role for role in ROLES}}
_FIELDS: Mapping[str, Collection[str]] = {
    "assistant": ("tool_calls", "refusal", *REASONING),
    "tool": ("tool_call_id", "name"),
}
"""By role, beside role and content."""
_NOTHING = (None, "", [], {}, ())


class UnreadMessageError(DataError):
    """A message that cannot be read.

    Attributes:
        where: the field, such as `messages[2].content`.
    """

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        return UnreadMessageError, (self.where, str(self).removeprefix(f"{self.where} "))


def read_messages(
    found: object, where: str = "messages", also: Collection[str] = ()
) -> tuple[Message, ...]:
    """The messages of a list.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Hi."}]}])
    (Message(role='system', content='Hi.', tool_calls=(), name=None, reasoning=''),)

    Args:
        found: the list.
        where: what it is called.
        also: fields of messages that the caller reads.

    Raises:
        UnreadMessageError: A message of it, and what is wrong with it.
    """
    items = _list(found, where)
    if not items:
        raise UnreadMessageError(where, "must have at least one")
    names: dict[str, str] = {}  # of tools, by the id of a call
    return tuple(_message(each, f"{where}[{at}]", names, also) for at, each in enumerate(items))


def _message(found: object, where: str, names: dict[str, str], also: Collection[str]) -> Message:
    if not isinstance(found, Mapping):
        raise UnreadMessageError(where, f"must be an object, found {found!r:.60}")
    fields = {name: each for name, each in cast(Json, found).items() if each not in _NOTHING}
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        hint = nearest(str(fields.get("role")), _ROLES)
        what = f"is unknown; {hint}" if "role" in fields else f"is missing; {hint}"
        raise UnreadMessageError(f"{where}.role", what)
    read = ("role", "content", *_FIELDS.get(role, ()), *also)
    for name in fields:
        if name not in read:
            raise UnreadMessageError(
                f"{where}.{name}",
                f"is not read in a message of the role {role}; read are {', '.join(read)}: take it "
                "out of the data",
            )
    content = _content(fields.get("content", cast(Json, found).get("content")), f"{where}.content")
    if role == "assistant":
        return _turn(fields, content, where, names)
    if content is None:
        raise UnreadMessageError(f"{where}.content", "must be text")
    return Message(role, content, name=_tool_name(fields, where, names))


def _turn(fields: Json, content: str | None, where: str, names: dict[str, str]) -> Message:
    calls = _list(fields.get("tool_calls", []), f"{where}.tool_calls")
    read = tuple(_call(each, f"{where}.tool_calls", names) for each in calls)
    if (refusal := fields.get("refusal")) is not None:
        if content or read:
            raise UnreadMessageError(f"{where}.refusal", "must stand alone, without a content")
        content = _text(refusal, f"{where}.refusal")
    if content is None and not read:
        raise UnreadMessageError(f"{where}.content", "must be text, or there must be tool_calls")
    given = [name for name in REASONING if name in fields]
    thoughts = {name: _text(fields[name], f"{where}.{name}") for name in given}
    if len({*thoughts.values()}) > 1:
        raise UnreadMessageError(where, f"must have one thought, found {', '.join(thoughts)}")
    return Message("assistant", content or "", read, reasoning=next(iter(thoughts.values()), ""))


def _tool_name(fields: Json, where: str, names: Mapping[str, str]) -> str | None:
    call, name = fields.get("tool_call_id"), fields.get("name")
    if name is not None:
        name = _text(name, f"{where}.name")
    if call is None:
        return name
    if str(call) not in names:
        raise UnreadMessageError(f"{where}.tool_call_id", "must be that of a call before it")
    called = names[str(call)]
    if name not in (None, called):
        raise UnreadMessageError(f"{where}.name", f"must be that of its call, {called!r:.60}")
    return called


def _content(found: object, where: str) -> str | None:
    """Text, or parts that are text, a line each."""
    if found is None or isinstance(found, str):
        return found
    texts: list[str] = []
    wanted = "must be text, or parts of type text"
    for part in _list(found, where, wanted):
        fields = cast(Json, part) if isinstance(part, Mapping) else {}
        given = {name: each for name, each in fields.items() if each is not None}
        kind = given.pop("type", None)
        text = given.pop(str(kind), None) if kind in ("text", "refusal") else None
        if kind not in ("text", "refusal"):
            raise UnreadMessageError(where, f"{wanted}, found type {kind!r:.60}")
        if not isinstance(text, str) or given:
            raise UnreadMessageError(where, f"{wanted}, found {', '.join(given) or text!r:.60}")
        texts.append(text)
    return "\n".join(texts)


def _call(found: object, where: str, names: dict[str, str]) -> ToolCall:
    call = cast(Json, found) if isinstance(found, Mapping) else {}
    function = call.get("function")
    fields = cast(Json, function) if isinstance(function, Mapping) else {}
    name, arguments = fields.get("name"), fields.get("arguments")
    try:
        read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        read = None
    if not isinstance(name, str) or not isinstance(read, Mapping):
        raise UnreadMessageError(
            where, "must be calls of functions, with a name and arguments as a string of JSON"
        )
    names[str(call.get("id"))] = name
    # A string is JSON as it was written; in objects of Parquet null fills what is not there.
    return ToolCall(name, cast(Json, read if isinstance(arguments, str) else without_nulls(read)))


def without_nulls(found: object) -> object:
    """A value of JSON without the fields of objects that are null."""
    if isinstance(found, Mapping):
        fields = cast(Json, found).items()
        return {name: without_nulls(each) for name, each in fields if each is not None}
    if isinstance(found, list):
        return [without_nulls(each) for each in cast("list[object]", found)]
    return found


def _list(found: object, where: str, wanted: str = "must be a list") -> Sequence[object]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise UnreadMessageError(where, f"{wanted}, found {found!r:.60}")
    return cast("Sequence[object]", found)


def _text(found: object, where: str) -> str:
    if not isinstance(found, str):
        raise UnreadMessageError(where, f"must be text, found {found!r:.60}")
    return found
