"""What the public names promise: the signatures of functions, fields and methods.

    python -m tests.public_names > tests/data/public_names.txt

writes them anew, for who has decided to change one and says so in CHANGELOG.md.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator

import chz

import es_cookbook


def promises() -> str:
    """Return a paragraph for each name."""
    told = (f"{name}{_told(getattr(es_cookbook, name))}" for name in es_cookbook.__all__)
    return re.sub(
        r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", "\n".join(told)
    )  # Where a type is, none is told.


def _told(thing: object) -> str:
    if inspect.isfunction(thing):
        return f"{inspect.signature(thing)}\n"
    assert isinstance(thing, type)
    lines = [f"    {line}" for line in (*_fields(thing), *_methods(thing))]
    return "\n".join(["", *lines, ""])


def _fields(thing: type) -> Iterator[str]:
    if chz.is_chz(thing):
        for name, field in sorted(chz.chz_fields(thing).items()):
            yield f"{name}: {inspect.formatannotation(field.x_type)}"
    elif dataclasses.is_dataclass(thing):
        for field in filter(lambda each: not each.name.startswith("_"), dataclasses.fields(thing)):
            yield f"{field.name}: {inspect.formatannotation(field.type)}"


def _methods(thing: type) -> Iterator[str]:
    for name, member in sorted(inspect.getmembers(thing)):
        is_own = name == "__call__" or not (name.startswith("_") or chz.is_chz(thing))
        if is_own and inspect.isfunction(member) and "chz" not in member.__module__:
            begin = "async " if inspect.iscoroutinefunction(member) else ""
            yield f"{begin}{name}{inspect.signature(member)}"
        elif is_own and isinstance(member, property):
            yield f"{name} (property)"


if __name__ == "__main__":
    print(promises())
