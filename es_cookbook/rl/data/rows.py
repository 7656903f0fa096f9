"""A row of data, with its origin; and how it is shown: text with its fields in braces, or a chat.

A `Row` returns its fields by name and type, and names file and line in the error about a wrong one.
`Remarks` says of many rows which do not fit. `sources` says where rows come from.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Literal, TypeAlias, TypeVar, cast

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.terminal import plural, say
from es_cookbook.rl.rewards.answers import first_field, lettered

Fields: TypeAlias = Mapping[str, object]
TAGS = re.compile("</?(?:think|answer)>")
_FIELD = re.compile(r"\s*\{(\w+)\}\s*")
"""A template that is a field and nothing else."""
T = TypeVar("T")
OnBadRow: TypeAlias = Literal["refuse", "skip"]
ON_BAD_ROW_DOC = "of a row that lacks what the task needs; skip: say so, and go on"
_MOST_NAMED = 3
"""Rows that are named where more are told of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row; `where`, for example "train.jsonl, line 3", opens every error sentence."""

    where: str
    fields: Fields

    def integer(self, *names: str) -> int:
        """The integer under the first of `names` that is there: sets differ in names."""
        return cast(int, self._fitting(names, _is_integer, "a whole number"))

    def integers(self, *names: str) -> tuple[int, ...]:
        """The list of integers under the first of `names` that is there; not empty."""
        return tuple(
            cast(list[int], self._fitting(names, _are_integers, "a list of whole numbers"))
        )

    def text(self, *names: str) -> str:
        """The text under the first of `names` that is there; not empty."""
        return cast(str, self._fitting(names, _is_some_text, "text, and some"))

    def optional_text(self, name: str) -> str | None:
        """The text under `name`, or None where the row has none."""
        if self.fields.get(name) is None:
            return None
        return cast(str, self._fitting((name,), lambda value: isinstance(value, str), "text"))

    def value(self, name: str) -> object:
        """What stands under `name`, which must be there."""
        return self._first((name,))[1]

    def error(self, what: str) -> DataError:
        """An error about this row, to raise."""
        return DataError(f"{self.where}: {what}")

    def _fitting(self, names: tuple[str, ...], fits: Callable[[object], bool], what: str) -> object:
        name, value = self._first(names)
        if not fits(value):
            raise self.error(f"field {name!r} must be {what}, found {shown(value)}")
        return value

    def _first(self, names: tuple[str, ...]) -> tuple[str, object]:
        try:
            return first_field(self.fields, *names)
        except DataError as error:
            raise self.error(str(error)) from None


class Remarks:
    """What is said at once of rows that do not fit: how many there are, and which come first.

    Args:
        source: of the rows.
        on_bad_row: what is done with a row of which no problem can be made.
    """

    def __init__(self, source: str, on_bad_row: OnBadRow) -> None:
        self._source, self._on_bad_row = source, on_bad_row
        self._told: dict[str, list[str]] = {}
        self.num_bad = 0

    def add(self, where: str, how: str, why: str = "") -> None:
        """One more row of a kind."""
        name = where.removeprefix(f"{self._source}, ")
        self._told.setdefault(how, []).append(f"{name}: {why}" if why else name)

    def bad(self, where: str, error: DataError) -> None:
        """One more row that is skipped.

        Raises:
            DataError: The one given, where bad rows are refused.
        """
        if self._on_bad_row == "refuse":
            raise error
        self.num_bad += 1
        why = str(error).splitlines()[0].removeprefix(f"{where}: ").partition(";")[0]
        self.add(where, "unusable and skipped", why)

    def unless_bad(self, where: str, make: Callable[[], T]) -> T | None:
        """What is made of a row, or None if it is skipped; raises as `bad`."""
        try:
            return make()
        except DataError as error:
            self.bad(where, error)
            return None

    def say(self, num_rows: int, what: str, num_left: int) -> None:
        """Say it of so many rows, if there is something to say.

        Raises:
            DataError: None is left.
        """
        said = "; ".join(
            f"{len(names):,} {how} ({', '.join(names[:_MOST_NAMED])}"
            f"{', …' if len(names) > _MOST_NAMED else ''})"
            for how, names in self._told.items()
        )
        if said:
            said = f"{self._source}: of {plural(num_rows, what)}, {said}"
            if not num_left:
                raise DataError(f"{said}; none is left")
            say(said)


def check_template(template: str, option: str = "prompt") -> None:
    """Refuse what is no template; `option` is the user's name for it.

    Raises:
        ConfigError: It cannot be read, or asks for more than a field.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{option}={template!r:.80}: {error}; write {{{{ for a brace") from error
    for _, field, form, conversion in pieces:
        if field is not None and (not field.isidentifier() or form or conversion):
            raise ConfigError(
                f"{option}={template!r:.80}: in braces stands the name of one field of the row, "
                f"found {field!r:.40}; write {{{{ for a brace"
            )


def filled(template: str, row: Row) -> str:
    """The template with a row's values in it, in one pass: braces of a value stay.

    >>> filled("{question} = ?", Row("row 1", {"question": "6 * {7}"}))
    '6 * {7} = ?'

    Raises:
        DataError: The row lacks a field.
    """
    return "".join(
        literal + ("" if field is None else str(row.value(field)))
        for literal, field, _, _ in Formatter().parse(template)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Messages of a row, with a role and a content each, up to the last one of the user.

    Attributes:
        answer: a field for the assistant's answer to it, if there is one, as many sets have it.
    """

    messages: Sequence[Mapping[str, str]]
    answer: Fields


def chat_of(template: str, row: Row) -> Chat | None:
    """What a template asks that is nothing but a field with messages; None if it is another.

    Raises:
        DataError: It is no chat that a message of the user ends, answered or not.
    """
    found = _FIELD.fullmatch(template)
    value = row.fields.get(found[1]) if found else None
    items = cast("list[object]", value) if isinstance(value, list) else []
    if not found or not items or not all(isinstance(each, dict) for each in items):
        return None
    messages: list[dict[str, str]] = []
    for at, each in enumerate(cast("list[Fields]", items)):
        role, content = each.get("role"), each.get("content")
        fits = role in ("user", "assistant") or (role == "system" and at == 0)
        if not fits or not isinstance(content, str):
            raise row.error(
                f"message {at} of field {found[1]!r} must have the role user or assistant, or in "
                "the first place system, and a content that is text"
            )
        messages.append({"role": str(role), "content": content})
    answered = messages[-1]["role"] == "assistant"
    asked = messages[:-1] if answered else messages
    if not asked or asked[-1]["role"] != "user":
        raise row.error(
            f"field {found[1]!r} must end with a message of the user, or with one of the assistant "
            "that answers it"
        )
    return Chat(asked, {"answer": messages[-1]["content"]} if answered else {})


def with_choices(row: Row) -> Row:
    """The row with its lists of texts as choices by letter, a line each."""
    shown: dict[str, object] = {}
    for name, value in row.fields.items():
        texts = cast("dict[str, object]", value).get("text") if isinstance(value, dict) else value
        if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
            shown[name] = lettered(cast("list[str]", texts))
    return Row(row.where, {**row.fields, **shown})


def without_tags(value: object) -> object:
    """Texts in it without `TAGS`."""
    if isinstance(value, str):  # The second time a space: tags may stand in tags.
        return TAGS.sub(" ", TAGS.sub("", value))
    if isinstance(value, list):
        return [without_tags(each) for each in cast("list[object]", value)]
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: without_tags(each) for name, each in fields.items()}
    return value


def write_rows(output: str, rows: Sequence[Fields]) -> None:
    """Write rows as JSON lines to a file that is not there yet.

    Raises:
        ConfigError: It is there, or cannot be written; `output` is the user's name for it.
    """
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write output {output!r}: {error.strerror}") from error


def _is_some_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_integers(value: object) -> bool:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return bool(items) and all(map(_is_integer, items))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value in a sentence."""
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text
