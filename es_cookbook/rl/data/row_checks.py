"""What is known to be wrong with rows before a model is loaded: their fields.

A problem needs the model's tokenizer, and a model may take minutes to load; that a field of the
prompt is missing shows in the rows alone. All rows that a run uses are looked at, so the sentence
says whether the field's name is wrong or a row is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter

from es_cookbook.common.errors import DataError, nearest
from es_cookbook.common.terminal import plural
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.types import OnBadRow

_MOST_NAMED = 3


def fields_of(template: str) -> list[str]:
    """The fields that a template names, each once.

    >>> fields_of("{a} + {b} = {a}")
    ['a', 'b']
    """
    names = (name for _, name, _, _ in Formatter().parse(template) if name is not None)
    return list(dict.fromkeys(names))


def check_rows(
    rows: Sequence[Row],
    source: str,
    needed: Mapping[str, Sequence[str]],
    check: Callable[[Row], None],
    on_bad_row: OnBadRow,
) -> None:
    """Refuse rows that lack what a task needs.

    Args:
        rows: those that are used.
        source: the user's name for where they are from.
        needed: option -> fields of every row that it names.
        check: raises DataError for a row that cannot be used for another reason.
        on_bad_row: "skip" leaves bad rows out, so that only an error of all of them counts.

    Raises:
        DataError: How many rows lack which field, and the nearest that they have.
    """
    for option, names in needed.items():
        for name in names:
            lacking = [row for row in rows if row.fields.get(name) is None]
            if lacking and (on_bad_row == "refuse" or len(lacking) == len(rows)):
                raise DataError(_lacking(lacking, rows, source, name, option))
    errors = list(_errors(rows, check))
    if errors and (on_bad_row == "refuse" or len(errors) == len(rows)):
        more = len(errors) - 1
        of_more = f" (and {more:,} more of {plural(len(rows), 'row')} cannot be used)"
        raise DataError(f"{errors[0]}{of_more if more else ''}") from errors[0]


def _lacking(
    lacking: Sequence[Row], rows: Sequence[Row], source: str, name: str, option: str
) -> str:
    seen = {each for row in rows for each, value in row.fields.items() if value is not None}
    if len(lacking) == len(rows):
        who = f"all {len(rows):,} rows lack" if len(rows) > 1 else "the row lacks"
        return f"{source}: {who} {name!r}, which {option} names; {nearest(name, seen)}"
    places = [row.where.removeprefix(f"{source}, ") for row in lacking[:_MOST_NAMED]]
    more = ", …" if len(lacking) > len(places) else ""
    return (
        f"{source}: {len(lacking):,} of {plural(len(rows), 'row')} lack {name!r}, which {option} "
        f"names ({', '.join(places)}{more}); dataset.on_bad_row=skip leaves such rows out"
    )


def _errors(rows: Sequence[Row], check: Callable[[Row], None]) -> Iterator[DataError]:
    for row in rows:
        try:
            check(row)
        except DataError as error:
            yield error
