"""Parts by name: what this and other distributions have registered as entry points.

A part plugs in by its distribution's metadata alone (`importlib.metadata`): in the group of its
kind, for example `es_cookbook.optimizers`, a name stands for "module:Class", which is imported when
it is chosen. The parts of es_cookbook itself, of its plug-ins and of other distributions register
in the same way; installing a distribution means trusting what it registers.

    [project.entry-points."es_cookbook.optimizers"]
    walk = "my_package.walk:Walk"

    [project.entry-points."es_cookbook.api"]
    1 = "my_package"

The second names the version of the interface for which a distribution is made.

Source: https://packaging.python.org/en/latest/specifications/entry-points/
"""

import functools
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint
from typing import cast

from es_cookbook.common.errors import ConfigError

API = "1"
"""Version of what plug-ins may rely on."""
_OWN = "es-cookbook"
_PREFIX = "es_cookbook."
_API_GROUP = f"{_PREFIX}api"


class Registered(Mapping[str, str]):
    """Name -> "module:Class" of one group; looked up when it is first used."""

    def __init__(self, group: str) -> None:
        self.group = group

    def __getitem__(self, name: str) -> str:
        return parts(self.group)[name][0].value

    def __iter__(self) -> Iterator[str]:
        return iter(parts(self.group))

    def __len__(self) -> int:
        return len(parts(self.group))


def distribution_of(part: EntryPoint) -> Distribution:
    """Return the distribution that has registered a part."""
    return cast(Distribution, part.dist)


def is_own(part: EntryPoint) -> bool:
    """Return whether a part belongs to es_cookbook itself."""
    return distribution_of(part).name == _OWN


def whose(part: EntryPoint) -> str:
    """Return the distribution of a part, with its version."""
    return f"{distribution_of(part).name} {distribution_of(part).version}"


def part(group: str, name: str) -> EntryPoint:
    """Return the part of a name; the group may be written with `es_cookbook.` before it.

    Raises:
        KeyError: There is none.
        ConfigError: Two distributions have registered the name, or it is made for another version
            of the interface.
    """
    group = group.removeprefix(_PREFIX)
    found, *others = parts(group)[name]
    if others:
        kind = group.removesuffix("s").replace("_", " ")
        every = " and by ".join(map(whose, (found, *others)))
        raise ConfigError(f"{kind} {name!r} is registered by {every}; uninstall one of them")
    if is_own(found):
        return found
    entries = distribution_of(found).entry_points
    made_for = sorted(each.name for each in entries if each.group == _API_GROUP)
    if API not in made_for:
        said = f"version {', '.join(made_for)}" if made_for else "no version"
        raise ConfigError(
            f"{distribution_of(found).name} is made for {said} of the interface that plug-ins have "
            f"(the group {_API_GROUP}), and this {_OWN} has version {API}: install one that is "
            "made for it"
        )
    return found


def parts(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Return the parts that distributions have registered in a group, by their names."""
    return groups().get(group, {})


def parts_of(value: str) -> Sequence[EntryPoint]:
    """Return the parts that are registered as this "module:Class", in any group."""
    every = (named for names in groups().values() for named in names.values())
    return [each for named in every for each in named if each.value == value]


@functools.cache
def groups() -> Mapping[str, Mapping[str, Sequence[EntryPoint]]]:
    """Return the parts of all groups: group -> name -> its parts.

    Raises:
        ConfigError: es_cookbook is not installed.
    """
    every = importlib.metadata.entry_points()
    found: dict[str, dict[str, list[EntryPoint]]] = {}
    for group in sorted(every.groups):
        if group.startswith(_PREFIX) and group != _API_GROUP:
            names = found.setdefault(group.removeprefix(_PREFIX), {})
            for entry in sorted(every.select(group=group), key=lambda entry: entry.name):
                names.setdefault(entry.name, []).append(entry)
    if not found:
        raise ConfigError(
            f"{_OWN} is on Python's path but not installed, so none of its parts is known by its "
            "name; install it (pip install --editable . in its folder)"
        )
    return found
