"""List the parts of every installed distribution by kind, and which of them cannot be used.

    python -m es_cookbook plugins

Parts of other distributions than es-cookbook are imported, to check that they can be.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.registry import groups, is_own, part, whose
from es_cookbook.common.trust import load


@chz.chz
class Plugins:
    """List the parts that are registered, with their distributions and versions."""


def main(config: Plugins) -> None:
    for distribution, parts in _by_distribution().items():
        print(distribution)
        for group, names in parts.items():
            print(f"  {group + ':':<16} {', '.join(names)}")
        print()
    for line in problems():
        print(line)


def _by_distribution() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the parts by distribution and group; es-cookbook comes first."""
    found: dict[str, dict[str, list[str]]] = {}
    every = [
        (group, each)
        for group, names in groups().items()
        for registered in names.values()
        for each in registered
    ]
    for group, each in sorted(every, key=_place):
        found.setdefault(whose(each), {}).setdefault(group, []).append(each.name)
    return found


def _place(found: tuple[str, EntryPoint]) -> tuple[bool, str]:
    return not is_own(found[1]), whose(found[1])


def problems() -> Iterator[str]:
    """Yield a sentence for each name that cannot be used."""
    for group, names in groups().items():
        for name, (first, *others) in names.items():
            if is_own(first) and not others:
                continue
            try:
                load(part(group, name).value)
            except ConfigError as error:
                yield str(error)


def cli() -> None:
    run_cli(main, Plugins)
