"""Values of rows as text, and texts as rewards compare them.

There is one text for a value, in prompts, gold answers, tags, splits and choices.

Text is shown as it is. Whole numbers have no decimal point: a table that lacks some of them, as
pandas writes it, has floats in their column. Lists and objects are JSON, true and null as well;
dates and times are ISO 8601.

Texts are compared in Unicode's NFC: a letter and its accents are one character, since data,
keyboards and models may have either form, which look the same to a reader.
"""

import datetime
import json
import unicodedata
from decimal import Decimal
from typing import TypeAlias, cast

from es_cookbook.common.errors import DataError

Scalar: TypeAlias = str | int | float | Decimal | datetime.date | datetime.time
"""Values that are shown without JSON; a bool is an int."""
_FIRST_WITH_POWER = 1e21
"""Whole floats from here on are shown with a power of ten, as in JavaScript."""


def printed(value: object) -> str:
    """Return a value as text.

    >>> printed(42.0), printed("007"), printed({"right": True, "of": ["Åsa", 1.5, None]})
    ('42', '007', '{"right": true, "of": ["Åsa", 1.5, null]}')

    Raises:
        DataError: There are bytes in it; those that are UTF-8 are text since rows were read.
    """
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    value = whole(value)
    if isinstance(value, float | Decimal):
        return json.dumps(value) if isinstance(value, float) else format(value, "f")
    if isinstance(value, bytes | bytearray | memoryview):
        raise DataError("must be text, found bytes that are not UTF-8")
    if isinstance(value, dict | list | tuple | bool) or value is None:
        return _json(cast(object, value))
    return str(value)


def whole(value: object) -> object:
    """Convert a whole float to an int; return any other value unchanged.

    >>> whole(42.0), whole(0.5), whole("42.0"), whole(1e22)
    (42, 0.5, '42.0', 1e+22)
    """
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _FIRST_WITH_POWER
    return int(Decimal(repr(value))) if is_whole else value


def _json(value: object) -> str:
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return f"{{{', '.join(f'{_json(str(key))}: {_json(each)}' for key, each in items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_json, cast('list[object]', value)))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = printed(value)
    return (
        text if isinstance(value, int | float | Decimal) else json.dumps(text, ensure_ascii=False)
    )


def composed(text: str) -> str:
    r"""Return a text in Unicode's NFC: letters and their accents are one character.

    >>> len("e\u0301t\u00e9"), len(composed("e\u0301t\u00e9"))
    (4, 3)
    """
    return unicodedata.normalize("NFC", text)


def folded(text: str) -> str:
    """Return a text in NFC without upper and lower case."""
    return composed(composed(text).casefold())
