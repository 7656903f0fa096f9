"""Templates: what is asked of a row, as text with its fields in braces: `"{question} = ?"`."""

from string import Formatter

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.data.rows import Row


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
