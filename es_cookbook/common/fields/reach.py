"""What a config makes the program reach: addresses, repositories, accounts, code of others.

A field that reaches something is marked by `needs_trust` with the word that allows it,
`trust=https://judge.example` for example. A value that is typed on the command line or written in
Python is allowed; a value from a config file is refused until `trust=` names its word.

Options of other libraries are recorded as text. From such a config they may hold numbers and plain
words, and nothing that could be a path, a reference or the name of a module (`is_plain_option`).
"""

import functools
import importlib.machinery
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import chz

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.references import ANYTHING_REACHED, is_own, references_in, script_of
from es_cookbook.common.registry import parts_of
from es_cookbook.common.terminal import printable

_NEEDS_TRUST = "needs_trust"
_ADDRESS = re.compile(r"(https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?)(?:[/?#]\S*)?", re.ASCII)
"""Read alike by every library; no user name stands before the host."""
_WORD = re.compile(r"[\w.+-]{0,100}", re.ASCII)


class _Reached(NamedTuple):
    """One field that reaches something: where, the word that allows it, and what it would do."""

    where: str
    word: str
    sentence: str


def needs_trust(word: Callable[[Any], str | None], does: str) -> dict[str, object]:
    """Metadata of a field that reaches something.

    Args:
        word: returns what `trust=` has to name, given the object that has the field; None if its
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
                yield _Reached(path, said, f"{path}: {shown} {does}")
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
        config: from a file.
        trust: words of the user; an address allows everything below it.
        typed: options that the user gave, which may reach anything.
        where: what the config is called.

    Raises:
        ConfigError: Names the first field that reaches something, and all words that are missing.
    """
    if ANYTHING_REACHED in trust:
        return
    refused: list[_Reached] = []
    for each in reached(config, where):
        path = each.where.partition(".")[2]
        is_typed = any(path == name or path.startswith(f"{name}.") for name in typed)
        if not is_typed and not any(
            said == each.word or said.startswith(f"{each.word}/") for said in trust
        ):
            refused.append(each)
    if refused:
        words = ",".join(dict.fromkeys(f"{each.word:.200}" for each in refused))
        raise ConfigError(f"{refused[0].sentence}; if you trust it, add trust={words:.300}")


def needed_trust(config: object, config_json: str) -> tuple[str, ...]:
    """Returns what `trust=` has to name before another program reads a config of this process.

    Args:
        config: of this process.
        config_json: the same as text.
    """
    code = [text for text in references_in(json.loads(config_json)) if not is_own(text)]
    modules = sorted({text.partition(":")[0] for text in code if not parts_of(text)})
    named = (script_of(module) or module.partition(".")[0] for module in modules)
    return tuple(dict.fromkeys((*map(str, named), *(each.word for each in reached(config)))))


def trust_option(config: object, config_json: str) -> dict[str, str]:
    """The same as an option of a command that a sentence proposes; empty if none is needed."""
    words = needed_trust(config, config_json)
    return {"trust": ",".join(words)} if words else {}


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
