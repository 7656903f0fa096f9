"""Files of generated rows: their options, kinds in turn, and how they are written."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import plural
from es_cookbook.rl.data.rows import Fields

_Row = TypeVar("_Row")


@chz.chz
class RowsConfig:
    """A file of generated rows: the one that a recipe brings, or another like it."""

    output: str = chz.field(doc=".jsonl file to write; it must not be there yet")
    count: int | None = chz.field(
        default=None,
        doc="rows; None: as many as the recipe's own file has",
    )
    seed: int = chz.field(default=0, doc="same seed, same rows")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "count", at_least=1)


def by_turns(
    kinds: Sequence[Callable[[], _Row]], key: Callable[[_Row], str | None]
) -> Iterator[_Row]:
    """Endless stream: all kinds in turn, no key twice, and none without one."""
    seen: set[str | None] = {None}
    for make in itertools.cycle(kinds):
        while key(row := make()) in seen:
            pass
        seen.add(key(row))
        yield row


def write(config: RowsConfig, rows: Iterator[Fields], what: str, count: int) -> None:
    """Write `config.count` rows, or so many.

    Raises:
        ConfigError: The file is there already, or cannot be written.
    """
    found = list(itertools.islice(rows, config.count or count))
    try:
        with Path(config.output).open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
    except OSError as error:
        raise ConfigError(f"cannot write output {config.output!r}: {error.strerror}") from error
    print(f"{plural(len(found), what)} written to {config.output}")


def with_a_wrong_character(answer: str, rng: random.Random) -> str:
    """The answer with one letter or digit, at any place, replaced by another."""
    place = rng.randrange(len(answer))
    alphabet = "0123456789" if answer[place].isdigit() else "abdefgilmnoprstu"
    other = rng.choice([each for each in alphabet if each != answer[place]])
    return answer[:place] + other + answer[place + 1 :]
