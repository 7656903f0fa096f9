"""Text from a model or an Env on its way to a terminal or a script: data, never commands.

An escape sequence in an answer could recolour a terminal, rewrite what stands above or worse, so
nothing goes out but characters that can be seen, and newlines where the reader expects them.
"""

import unicodedata

_LINE_ENDS = "\u2028\u2029"
"""No control characters, but `str.splitlines` and some terminals end a line at them."""


def printable(text: str) -> str:
    r"""Text that a terminal shows and never obeys: control characters are written out.

    >>> printable("\x1b[31mred\n")
    '\\x1b[31mred\n'
    """
    return "".join(
        character if character == "\n" or not _is_control(character) else _escaped(character)
        for character in text
    )


def one_line(text: str) -> str:
    r"""The same on one line: newlines are written out too, and backslashes, so it can be undone.

    >>> one_line("a\\b\n")
    'a\\\\b\\n'
    >>> one_line("ä\n→").encode("latin-1", "backslashreplace").decode("unicode_escape")
    'ä\n→'
    """
    return "".join(
        _escaped(character) if character == "\\" or _is_control(character) else character
        for character in text
    )


def _is_control(character: str) -> bool:
    return unicodedata.category(character)[0] == "C" or character in _LINE_ENDS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
