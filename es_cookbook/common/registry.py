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

import dataclasses
import functools
import importlib.metadata
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from es_cookbook.common.errors import ConfigError

API = "1"
"""Version of what plug-ins may rely on."""
_OWN = "es-cookbook"
_PREFIX = "es_cookbook."
_API_GROUP = f"{_PREFIX}api"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part that a distribution has registered.

    Attributes:
        group: its kind, without the prefix `es_cookbook.`.
        name: name that users type.
        value: "module:Class".
        distribution: whose it is, as its metadata calls it.
        version: version of the distribution.
        made_for: versions of the interface.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    made_for: Sequence[str]

    @property
    def is_own(self) -> bool:
        """Whether it is part of es_cookbook itself."""
        return self.distribution == _OWN

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


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


def part(group: str, name: str) -> Part:
    """The part of a name.

    Raises:
        KeyError: There is none.
        ConfigError: Two distributions have registered the name, or it is made for another version
            of the interface.
    """
    found, *others = parts(group)[name]
    if others:
        kind = group.removesuffix("s").replace("_", " ")
        whose = " and by ".join(map(str, (found, *others)))
        raise ConfigError(f"{kind} {name!r} is registered by {whose}; uninstall one of them")
    if not found.is_own and API not in found.made_for:
        said = f"version {', '.join(found.made_for)}" if found.made_for else "no version"
        raise ConfigError(
            f"{found.distribution} is made for {said} of the interface that plug-ins have (the "
            f"group {_API_GROUP}), and this {_OWN} has version {API}: install one that is made "
            "for it"
        )
    return found


def parts(group: str) -> Mapping[str, tuple[Part, ...]]:
    """Name -> the parts that distributions have registered in a group, by their names."""
    return groups().get(group, {})


def parts_of(value: str) -> Sequence[Part]:
    """The parts that are registered as this "module:Class", in any group."""
    every = (itertools.chain.from_iterable(names.values()) for names in groups().values())
    return [each for each in itertools.chain.from_iterable(every) if each.value == value]


@functools.cache
def groups() -> Mapping[str, Mapping[str, tuple[Part, ...]]]:
    """Group -> its parts, of all groups.

    Raises:
        ConfigError: es_cookbook is not installed.
    """
    found: dict[str, dict[str, list[Part]]] = {}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        # Reading entry points alone is quick; there may be hundreds of distributions.
        if f"[{_PREFIX}" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        if name in seen:  # The first on Python's path is the one that is imported.
            continue
        seen.add(name)
        entries = distribution.entry_points
        made_for = sorted(each.name for each in entries if each.group == _API_GROUP)
        whose = distribution.name, distribution.version, made_for
        for each in entries:
            if each.group.startswith(_PREFIX) and each.group != _API_GROUP:
                group = each.group.removeprefix(_PREFIX)
                of_name = found.setdefault(group, {}).setdefault(each.name, [])
                of_name.append(Part(group, each.name, each.value, *whose))
    if _OWN not in seen:
        raise ConfigError(
            f"{_OWN} is on Python's path but not installed, so none of its parts is known by its "
            "name; install it (pip install --editable . in its folder)"
        )
    return {
        group: {name: tuple(named) for name, named in sorted(names.items())}
        for group, names in sorted(found.items())
    }
