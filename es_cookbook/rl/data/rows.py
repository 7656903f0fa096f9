"""A row of data, with its origin; and how it is shown: text with its fields in braces, or a chat.

A `Row` returns its fields by name and type, and names file and line in the error about a wrong one.
`SkippedRows` says of many rows which do not fit. `sources` says where rows come from.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from string import Formatter
from typing import TypeAlias, TypeVar, cast

from es_cookbook.common.errors import ConfigError, DataError, ESCookbookError
from es_cookbook.common.files import strict_json
from es_cookbook.common.terminal import plural, say
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.reading import FieldError, JsonObject, read_messages, read_tools
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.rewards.answers import first_field, lettered, text_of
from es_cookbook.rl.rewards.values import whole
from es_cookbook.rl.types import OnBadRow

Fields: TypeAlias = Mapping[str, object]
_TAGS = re.compile("</?(?:think|answer)>")
_FIELD = re.compile(r"\s*\{(\w+)\}\s*")
"""A template that is a field and nothing else."""
T = TypeVar("T")
_MOST_NAMED = 3
"""Number of rows that are named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row; `where`, for example "train.jsonl, line 3", opens every error sentence.

    Prompts may show perfect answers to `shown` rows, as examples before this one's question.
    `are_texts`: whole numbers are written in texts, as in CSV.
    """

    where: str
    fields: Fields
    shown: "Sequence[Row]" = ()
    are_texts: bool = False

    def integer(self, *names: str) -> int:
        """Return the integer under the first of `names` that exists: datasets differ in names."""
        fits = _is_written_integer if self.are_texts else _is_integer
        return int(cast(str, whole(self._fitting(names, fits, "a whole number"))))

    def integers(self, *names: str) -> tuple[int, ...]:
        """Return the list of integers under the first of `names` that exists; not empty."""
        found = cast("list[float]", self._fitting(names, _are_integers, "a list of whole numbers"))
        return tuple(map(int, found))

    def text(self, *names: str) -> str:
        """Return the text under the first of `names` that exists; not empty."""
        return cast(str, self._fitting(names, _is_some_text, "text, and some"))

    def optional_text(self, name: str) -> str | None:
        """Return the text under `name`; None if the row has none, or an empty one as in CSV."""
        if self.fields.get(name) in (None, ""):
            return None
        return cast(str, self._fitting((name,), lambda value: isinstance(value, str), "text"))

    def value(self, name: str) -> object:
        """Return the value of field `name`, which must exist."""
        return self._first((name,))[1]

    def printed(self, name: str) -> str:
        """Return the text of a row's field `name`, which must exist."""
        with self.named_in(DataError):
            return text_of(self.fields, name)

    def error(self, what: str) -> DataError:
        """Make an error about this row, to raise."""
        return DataError(f"{self.where}: {what}")

    @contextlib.contextmanager
    def named_in(self, kind: type[ESCookbookError]) -> Generator[None]:
        """Add the row to errors of a kind in the block."""
        try:
            yield
        except kind as error:
            raise self.error(str(error)) from error

    def _fitting(self, names: tuple[str, ...], fits: Callable[[object], bool], what: str) -> object:
        name, value = self._first(names)
        if not fits(value):
            raise self.error(f"field {name!r} must be {what}, found {shown(value)}")
        return value

    def _first(self, names: tuple[str, ...]) -> tuple[str, object]:
        with self.named_in(DataError):
            return first_field(self.fields, *names)


class SkippedRows:
    """Counts rows that do not fit, and names the first of them in one sentence.

    Args:
        source: source of the rows.
        on_bad_row: action for a row that cannot become a problem.
    """

    def __init__(self, source: str, on_bad_row: OnBadRow) -> None:
        self._source, self._on_bad_row = source, on_bad_row
        self._told: dict[str, list[str]] = {}
        self.num_bad = 0

    def add(self, where: str, how: str, why: str = "") -> None:
        """Count a row of a kind."""
        name = where.removeprefix(f"{self._source}, ")
        self._told.setdefault(how, []).append(f"{name}: {why}" if why else name)

    def bad(self, where: str, error: DataError) -> None:
        """Count a row that is skipped.

        Raises:
            DataError: The one given, where bad rows are refused.
        """
        if self._on_bad_row == "refuse":
            raise error
        self.num_bad += 1
        why = str(error).splitlines()[0].removeprefix(f"{where}: ").partition(";")[0]
        self.add(where, "unusable and skipped", why)

    def unless_bad(self, where: str, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, or None if the row is skipped; raises as `bad`."""
        try:
            return make()
        except DataError as error:
            self.bad(where, error)
            return None

    def say(self, num_rows: int, what: str, num_left: int) -> None:
        """Print a summary of the rows that do not fit, if there are any.

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
    """Refuse an invalid template; `option` is the user's name for it.

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


def fields_of(template: str) -> list[str]:
    """Return the fields that a template names.

    >>> fields_of("{a} + {b} = {a}")
    ['a', 'b', 'a']
    """
    return [name for _, name, _, _ in Formatter().parse(template) if name]


def filled(template: str, row: Row) -> str:
    """Fill a template with a row's values in one pass, so that braces in a value stay.

    >>> filled("{question} = ?", Row("row 1", {"question": "6 * {7}"}))
    '6 * {7} = ?'

    Raises:
        DataError: The row lacks a field, or has bytes in it.
    """
    return "".join(
        literal + ("" if field is None else row.printed(field))
        for literal, field, _, _ in Formatter().parse(template)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Messages of a row, up to the last one of the user or of a tool.

    Attributes:
        answer: a field for the assistant's answer to it, if there is one, as many sets have it.
        tools: tools that the model may call, if the row has a field of that name.
    """

    messages: Sequence[Message]
    answer: Fields
    tools: Sequence[ToolSchema] = ()


def chat_of(template: str, row: Row) -> Chat | None:
    """Return the chat of a template that is only a field with messages; None for other templates.

    Raises:
        DataError: It is not a chat that ends with a user's message, answered or not.
    """
    found = _FIELD.fullmatch(template)
    value = row.fields.get(found[1]) if found else None
    items = cast("list[object]", value) if isinstance(value, list) else []
    if not found or not any(isinstance(each, dict) and "role" in each for each in items):
        return None
    messages = messages_of(row, found[1])
    *before, last = messages
    answered = last.role == "assistant"
    asked = before if answered else messages
    if not asked or asked[-1].role not in ("user", "tool"):
        raise row.error(
            f"field {found[1]!r} must end with a message of the user or of a tool, or with one of "
            "the assistant that answers it"
        )
    if answered and (last.tool_calls or last.reasoning):
        raise row.error(
            f"field {found[1]!r} ends with an answer that is more than text, with which no answer "
            "is compared: take out its calls of tools and thoughts, or give another last message"
        )
    return Chat(asked, {"answer": last.content} if answered else {}, tools_of(row))


def messages_of(row: Row, name: str = "messages") -> Sequence[Message]:
    """Read the messages in a field of a row.

    Raises:
        DataError: One of them cannot be read; says which.
    """
    value = row.value(name)
    with _of(row, name):
        return read_messages(_plain(value, name), name)


def tools_of(row: Row) -> tuple[ToolSchema, ...]:
    """Read the tools of a chat from the row's field `tools`, a list of schemas or its JSON.

    Raises:
        DataError: It holds something else.
    """
    found = row.fields.get("tools") or ()
    with _of(row, "tools"):
        if isinstance(found, str):
            found = strict_json(found)
        items = found if isinstance(found, list | tuple) else [found]
        return read_tools(JsonObject({"tools": _plain(items, "tools")}).each("tools"))


@contextlib.contextmanager
def _of(row: Row, name: str) -> Generator[None]:
    """Add the row to errors about a field that is read in the block."""
    try:
        yield
    except FieldError as error:
        raise row.error(str(error)) from error
    except (ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, ValueError) else "is nested too deeply"
        raise row.error(f"field {name!r} {what}") from error


def _plain(found: object, where: str) -> object:
    """Return a value as JSON has it, without null fields, which Parquet fills in.

    Raises:
        FieldError: JSON has no such value.
    """
    if isinstance(found, Mapping):
        fields = cast(Fields, found).items()
        return {name: _plain(each, f"{where}.{name}") for name, each in fields if each is not None}
    if isinstance(found, list | tuple):
        items = enumerate(cast("Sequence[object]", found))
        return [_plain(each, f"{where}[{at}]") for at, each in items]
    if found is None or isinstance(found, str | int):
        return found
    if isinstance(found, float) and math.isfinite(found):
        return found
    raise FieldError(where, f"must be text, a number, a list or an object, found {shown(found)}")


def with_choices(row: Row) -> Row:
    """Return the row with each list of texts as choices by letter, one per line."""
    shown: dict[str, object] = {}
    for name, value in row.fields.items():
        texts = _choices(value)
        if texts and all(isinstance(each, str) for each in texts):
            shown[name] = lettered(cast("list[str]", texts))
    return Row(row.where, {**row.fields, **shown})


def _choices(value: object) -> list[object] | None:
    """Return a list, or the list of texts of choices with labels; None for other values."""
    texts = cast("dict[str, object]", value).get("text") if isinstance(value, dict) else value
    return cast("list[object]", texts) if isinstance(texts, list) else None


def with_whole_numbers(row: Row) -> Row:
    """Return the row with whole floats, as in columns with nulls, as ints for rewards."""
    fields = {name: changed(value, whole) for name, value in row.fields.items()}
    return dataclasses.replace(row, fields=fields)


def without_tags(value: object) -> object:
    """Return a value with the tags removed from its texts."""
    # The second time a space: tags may stand in tags.
    return changed(
        value, lambda each: _TAGS.sub(" ", _TAGS.sub("", each)) if isinstance(each, str) else each
    )


def changed(value: object, change: Callable[[object], object]) -> object:
    """Apply a function to each value in lists and objects, or to the value itself."""
    if isinstance(value, list):
        return [changed(each, change) for each in cast("list[object]", value)]
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: changed(each, change) for name, each in fields.items()}
    return change(value)


def _is_some_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_integers(value: object) -> bool:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return bool(items) and all(map(_is_integer, items))


def _is_written_integer(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]{1,4000}", value) is not None


def _is_integer(value: object) -> bool:
    return isinstance(whole(value), int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return a value as text for a sentence."""
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text
