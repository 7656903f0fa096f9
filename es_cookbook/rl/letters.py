"""Texts as they are compared: a letter and its accents are one character (Unicode's NFC).

Data may have them in either form, keyboards and models too, and some tokenizers bring all to this
one. To a reader the forms are the same, so no reward tells them apart.
"""

import unicodedata


def composed(text: str) -> str:
    r"""A text whose letters have their accents in them.

    >>> len("e\u0301t\u00e9"), len(composed("e\u0301t\u00e9"))
    (4, 3)
    """
    return unicodedata.normalize("NFC", text)


def folded(text: str) -> str:
    """The same, in any case."""
    return composed(composed(text).casefold())
