"""Files of generated rows: the ones that recipes bring, and others like them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.fields.chz_fields import formerly
from es_cookbook.common.terminal import plural
from es_cookbook.rl.data.rows import Fields, write_rows

_Made = TypeVar("_Made")


@chz.chz
class Config:
    """What is generated."""

    output: str = chz.field(doc=".jsonl file to write; it must not be there yet")
    count: int | None = chz.field(
        default=None,
        doc="rows; None: as many as the recipe's own file has",
        metadata=formerly("num_problems"),
    )
    seed: int = chz.field(default=0, doc="same seed, same rows")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "count", at_least=1)


def by_turns(
    kinds: Sequence[Callable[[], _Made]], key: Callable[[_Made], str | None]
) -> Iterator[_Made]:
    """Endless: all kinds in turn, no key twice, and none without one."""
    seen: set[str | None] = {None}
    for make in itertools.cycle(kinds):
        while key(made := make()) in seen:
            pass
        seen.add(key(made))
        yield made


def write(config: Config, rows: Iterator[Fields], what: str, count: int) -> None:
    """Write `config.count` rows, or so many.

    Raises:
        ConfigError: The file is there already, or cannot be written.
    """
    found = list(itertools.islice(rows, config.count or count))
    write_rows(config.output, found)
    print(f"{plural(len(found), what)} written to {config.output}")
