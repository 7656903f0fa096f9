"""Parts by name: what this and other distributions have registered as entry points.

A part plugs in by its distribution's metadata alone (`importlib.metadata`): in the group of its
kind, `es_cookbook.optimizers` for one, a name stands for "module:Class", which is imported when it
is chosen. The parts of es_cookbook itself, of its plug-ins and of other distributions register in
the same way; installing a distribution means trusting what it registers.

    [project.entry-points."es_cookbook.optimizers"]
    walk = "my_package.walk:Walk"

    [project.entry-points."es_cookbook.api"]
    1 = "my_package"

The second says for which version of the interface a distribution is made.

Source: https://packaging.python.org/en/latest/specifications/entry-points/
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import re
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView

from typing_extensions import override

from es_cookbook.common.errors import ConfigError

API = "1"
"""Version of what plug-ins may rely on."""
_OWN = "es-cookbook"
_PREFIX = "es_cookbook."
_API_GROUP = f"{_PREFIX}api"
_VALUE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a distribution has registered.

    Attributes:
        group: of its kind, without `es_cookbook.` before it.
        name: what a user types.
        value: "module:Class".
        distribution: that has it, as its metadata calls it.
        version: of the distribution.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def is_own(self) -> bool:
        """Whether it is of es_cookbook itself."""
        return self.distribution == _OWN

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class Registered(Mapping[str, str]):
    """Name -> "module:Class" of one group; looked up when it is first used.

    Raises:
        ConfigError: When a name is asked for that two distributions have registered, or one that is
            made for another version of the interface; names them.
    """

    def __init__(self, group: str) -> None:
        self._group = group

    def __getitem__(self, name: str) -> str:
        return part(self._group, name).value

    @override
    def __contains__(self, name: object) -> bool:
        return name in parts(self._group)

    def first(self, name: str) -> str:
        """What a name stands for, without a check of who has registered it; for lists."""
        return parts(self._group)[name][0].value

    @override
    def items(self) -> ItemsView[str, str]:
        """The same for all names, as `first`."""
        return {name: self.first(name) for name in self}.items()

    @override
    def values(self) -> ValuesView[str]:
        """The same for all names, as `first`."""
        return dict(self.items()).values()

    def distribution(self, name: str) -> str:
        """Which distribution has registered a name; the first of several."""
        return parts(self._group)[name][0].distribution

    def __iter__(self) -> Iterator[str]:
        return iter(parts(self._group))

    def __len__(self) -> int:
        return len(parts(self._group))


def part(group: str, name: str) -> Part:
    """The part of a name.

    Raises:
        KeyError: There is none.
        ConfigError: As of `Registered`.
    """
    found, *others = parts(group)[name]
    if others:
        raise ConfigError(
            f"{_singular(group)} {name!r} is registered by "
            f"{' and by '.join(map(str, (found, *others)))}; uninstall one of them"
        )
    _check_api(found.distribution)
    return found


def parts(group: str) -> Mapping[str, tuple[Part, ...]]:
    """Name -> the parts that distributions have registered in a group, by their names."""
    return _registered().get(group, {})


def groups() -> Mapping[str, Mapping[str, tuple[Part, ...]]]:
    """Group -> its parts, of all groups."""
    return _registered()


def parts_of(value: str) -> tuple[Part, ...]:
    """The parts that are registered as this "module:Class", in whatever groups."""
    return _by_value().get(value, ())


def _check_api(distribution: str) -> None:
    """Check that a distribution is made for this version of the interface.

    Raises:
        ConfigError: It is not.
    """
    made_for = _versions().get(distribution, ())
    if distribution != _OWN and API not in made_for:
        said = f"version {', '.join(made_for)}" if made_for else "no version"
        raise ConfigError(
            f"{distribution} is made for {said} of the interface that plug-ins have (the group "
            f"{_API_GROUP}), and this {_OWN} has version {API}: install one that is made for it"
        )


def forget() -> None:
    """Clear what is cached, so that an installation is noticed."""
    for function in (_distributions, _registered, _by_value, _versions):
        function.cache_clear()


@functools.cache
def _registered() -> Mapping[str, Mapping[str, tuple[Part, ...]]]:
    found: dict[str, dict[str, list[Part]]] = {}
    for distribution in _distributions():
        for entry in distribution.entry_points:
            is_part = entry.group.startswith(_PREFIX) and entry.group != _API_GROUP
            if is_part and _VALUE.fullmatch(entry.value):
                group = entry.group.removeprefix(_PREFIX)
                made = Part(group, entry.name, entry.value, distribution.name, distribution.version)
                found.setdefault(group, {}).setdefault(entry.name, []).append(made)
    if not any(each.is_own for each in found.get("engines", {}).get("torch", ())):
        raise ConfigError(
            f"{_OWN} is on Python's path but not installed, so none of its parts is known by its "
            "name; install it (pip install --editable . in its folder)"
        )
    return {
        group: {name: tuple(named) for name, named in sorted(names.items())}
        for group, names in sorted(found.items())
    }


@functools.cache
def _by_value() -> Mapping[str, tuple[Part, ...]]:
    found: dict[str, tuple[Part, ...]] = {}
    for names in _registered().values():
        for each in itertools.chain.from_iterable(names.values()):
            found[each.value] = (*found.get(each.value, ()), each)
    return found


@functools.cache
def _versions() -> Mapping[str, tuple[str, ...]]:
    return {
        distribution.name: tuple(
            sorted(each.name for each in distribution.entry_points if each.group == _API_GROUP)
        )
        for distribution in _distributions()
    }


@functools.cache
def _distributions() -> Sequence[importlib.metadata.Distribution]:
    """Those that register anything here; of two of a name, as Python does, the first on its path.

    Metadata of all others, which may be hundreds, is not read.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    for each in importlib.metadata.distributions():
        if f"[{_PREFIX}" in (each.read_text("entry_points.txt") or ""):
            found.setdefault(re.sub(r"[-_.]+", "-", each.name).lower(), each)
    return tuple(found.values())


def _singular(group: str) -> str:
    return group.removesuffix("s").replace("_", " ")
