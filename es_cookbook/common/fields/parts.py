"""The classes that a config from a file may name at each field without `trust=`.

A field takes the class that it declares, and the classes that distributions have registered in the
groups of that kind (`es_cookbook.common.registry`). Any other name (a command's options, a function
that is not registered) is refused before it is imported, unless it belongs to a package or script
that the user trusts.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import chz

from es_cookbook.common.fields.declared_types import ANYTHING, arms
from es_cookbook.common.registry import Registered, parts_of

FUNCTIONS = Registered("functions")
"""Functions that a config may name: rewards of recipes, which only grade a text."""
_GROUPS: dict[type, tuple[str, ...]] = {}


def plugs_in(kind: type, *groups: str) -> None:
    """Declare the groups whose classes a field of this kind accepts.

    Args:
        kind: the class that fields declare; fields of a subclass accept its subclasses.
        groups: groups of entry points, without the prefix `es_cookbook.`.
    """
    _GROUPS[kind] = groups


_T = TypeVar("_T")


def built_field(builder: Callable[..., _T], doc: str = "", **settings: object) -> _T:
    """The field of a config for a part, with other defaults (`settings`) than its class."""
    factory = functools.partial(builder, **settings) if settings else builder
    return chz.field(default_factory=factory, blueprint_unspecified=factory, doc=doc)


def may_be_named(text: str, declared: object) -> bool:
    """Whether a config may name this class, "module:Class", at a field of that type."""
    found = {part.group for part in parts_of(text)}
    for arm in arms(declared):
        of_arm = arm if isinstance(arm, type) else None
        if of_arm is not None and text == f"{of_arm.__module__}:{of_arm.__qualname__}":
            return True
        for kind, groups in _GROUPS.items():
            fits = arm in ANYTHING or (of_arm is not None and issubclass(of_arm, kind))
            named = text == f"{kind.__module__}:{kind.__qualname__}"
            if fits and (named or found.intersection(groups)):
                return True
    return False
