"""Which classes of es_cookbook a config that comes from a file may name, and where.

A field takes the class that it declares. Where that is a kind of which there are several, the kind
says which (`parts`), as "module:Class" that is imported only when a config has it. Anything else of
es_cookbook (a command's options, a class beside the kind's own, a function that is not one of
`FUNCTIONS`) is refused by its name.
"""

import fnmatch
import re

from es_cookbook.common.fields.declared_types import ANYTHING, arms
from es_cookbook.common.references import current

FUNCTIONS = frozenset({"es_cookbook.recipes.pairwise.additions:measured"})
"""Functions of es_cookbook that a config may name: rewards of recipes, which only grade a text."""
_KINDS: dict[type, re.Pattern[str]] = {}


def parts(kind: type, *named: str) -> None:
    """Say which classes of es_cookbook may stand where a field declares this kind.

    Args:
        kind: a class that fields declare; fields of its subclasses take those that fit.
        named: "module:Class"; `*` stands for any name.
    """
    every = (f"{kind.__module__}:{kind.__qualname__}", *map(current, named))
    _KINDS[kind] = re.compile("|".join(map(fnmatch.translate, every)))


def may_be_named(text: str, declared: object) -> bool:
    """Whether a config may name this class of es_cookbook at a field of that type."""
    for arm in arms(declared):
        of_arm = arm if isinstance(arm, type) else None
        if of_arm is not None and text == f"{of_arm.__module__}:{of_arm.__qualname__}":
            return True
        for kind, named in _KINDS.items():
            fits = arm in ANYTHING or (of_arm is not None and issubclass(of_arm, kind))
            if fits and named.match(text):
                return True
    return False
