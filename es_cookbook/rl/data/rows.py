"""A row of data, with its origin; and text with a row's fields in braces: `"{question} = ?"`.

A `Row` returns its fields by name and type, and names file and line in the error about a wrong one.
`sources` says where rows come from.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import TypeAlias, cast

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.rl.rewards.answers import first_field

Fields: TypeAlias = Mapping[str, object]


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
