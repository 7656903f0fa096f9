"""What a config makes the program reach: addresses, repositories, accounts, code of others.

A field that reaches something is marked by `needs_trust` with the word that a user says for it,
`trust=https://judge.example` for example. On the command line and in Python the value is the user's
own word; a config that somebody else may have written is refused until the word is said.

Options of other libraries are recorded as text. From such a config they may hold numbers and plain
words, and nothing that could be a path, a reference or the name of a module (`is_plain_option`).
"""

import functools
import importlib.machinery
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import chz

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.references import ANYTHING_REACHED
from es_cookbook.common.terminal import printable

_NEEDS_TRUST = "needs_trust"
_ADDRESS = re.compile(r"(https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?)(?:[/?#]\S*)?", re.ASCII)
"""Read alike by every library; no user name stands before the host."""
_WORD = re.compile(r"[\w.+-]{0,100}", re.ASCII)


class _Reached(NamedTuple):
    """One field that reaches something: where, the word that allows it, and a whole sentence."""

    where: str
    word: str
    sentence: str


def needs_trust(word: Callable[[Any], str | None], does: str) -> dict[str, object]:
    """Metadata of a field that reaches something.

    Args:
        word: what a user says to allow it, told from the object that has the field; None where its
            value reaches nothing.
        does: a clause about the value, for the sentence.
    """
    return {_NEEDS_TRUST: (word, does)}


def reached(part: object, where: str = "config") -> Iterator[_Reached]:
    """All that a config, or a part of one, reaches."""
    if chz.is_chz(part) and not isinstance(part, type):
        for name, field in chz.chz_fields(part).items():
            value, path = getattr(part, field.x_name), f"{where}.{name}"
            needs = (field.metadata or {}).get(_NEEDS_TRUST)
            word, does = cast("tuple[Callable[[object], str | None], str]", needs or (_none, ""))
            if (said := word(part)) is not None:
                said, shown = printable(said), printable(f"{value!r:.200}")
                yield _Reached(
                    path, said, f"{path}: {shown} {does}; if you trust it, add trust={said:.200}"
                )
            yield from reached(value, path)
    elif isinstance(part, Mapping):
        for key, item in cast("Mapping[object, object]", part).items():
            yield from reached(item, f"{where}[{key!r:.60}]")
    elif isinstance(part, list | tuple):
        for i, item in enumerate(cast("list[object]", part)):
            yield from reached(item, f"{where}[{i}]")
    elif isinstance(part, functools.partial):
        bound = cast("functools.partial[object]", part)
        yield from reached(bound.args, where)
        yield from reached(bound.keywords, where)


def check_reached(
    config: object, trust: Collection[str], typed: Collection[str] = (), where: str = "config"
) -> None:
    """Refuse a config that reaches what the user has not named.

    Args:
        config: of whoever wrote its file.
        trust: the user's words; an address stands for all that is below it.
        typed: options that the user gave; what they, or their parts, hold is the user's own.
        where: what the config is called.

    Raises:
        ConfigError: Says what it would reach, and the word that allows it.
    """
    if ANYTHING_REACHED in trust:
        return
    for each in reached(config, where):
        path = each.where.partition(".")[2]
        is_typed = any(path == name or path.startswith(f"{name}.") for name in typed)
        if not is_typed and not any(
            said == each.word or said.startswith(f"{each.word}/") for said in trust
        ):
            raise ConfigError(each.sentence)


def address_of(url: str) -> str:
    """The scheme, host and port of a URL, and all of one that could be read in several ways.

    >>> address_of("https://judge.example:8000/v1"), address_of("http://a.example@b.example/v1")
    ('https://judge.example:8000', 'http://a.example@b.example/v1')
    """
    matched = _ADDRESS.fullmatch(url)
    return matched[1] if matched else url


def is_plain_option(value: object) -> bool:
    """Whether an option of a library is a number, a word that names nothing here, or such a list.

    >>> is_plain_option(3), is_plain_option("Hangman-v0"), is_plain_option("/etc/passwd")
    (True, True, False)
    >>> is_plain_option("os:system"), is_plain_option("antigravity"), is_plain_option({"id": "x"})
    (False, False, False)
    """
    if isinstance(value, list | tuple):
        return all(map(is_plain_option, cast("list[object]", value)))
    if not isinstance(value, str):
        return value is None or isinstance(value, int | float)
    return _WORD.fullmatch(value) is not None and not (value and _names_something(value))


def _names_something(word: str) -> bool:
    """Whether it is a file here, or a module, as libraries spell names of modules."""
    module = word.partition(".")[0].replace("-", "_")
    names = {module, module.lower()}
    finders = importlib.machinery.BuiltinImporter, importlib.machinery.PathFinder
    is_module = any(finder.find_spec(name) for finder in finders for name in names if name)
    return is_module or Path(word).exists()


def _none(_: object) -> None:
    return None
