"""Every class of es_cookbook as the value of every field that can take one, and every function.

What is no class is refused by its name alone, whatever the field: functions are tried as objects
where anything may stand, and as functions, with methods, in the first field that takes any.

    python -m tests.every_reference DIRECTORY

In a process of its own, since an audit hook cannot be taken away again. Names are read from the
source, so that nothing is imported before a config asks for it. Prints a line of JSON.
"""

import ast
import collections.abc
import dataclasses
import importlib
import itertools
import json
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import chz

import es_cookbook
from es_cookbook.common.configs import config_from_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.declared_types import ANYTHING, arms, may_be_called

PACKAGE = Path(es_cookbook.__file__).parent
RUNS = ("exec", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen")
REACHES = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "urllib.Request")
_MISSING = "missing required"
"""What is said of a class that was found and lacks a field."""
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")


@dataclasses.dataclass
class Found:
    """What the source says that there is."""

    names: list[str]
    classes: set[str]
    config_modules: list[str]


def found_in_source() -> Found:
    """All functions and classes, methods too, as "module:qualname", and modules of configs."""
    found = Found([], set(), [])
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("es_cookbook", *path.relative_to(PACKAGE).with_suffix("").parts)
        module = ".".join(parts).removesuffix(".__init__")
        text = path.read_text()
        tree = ast.parse(text)
        found.names += [f"{module}:{name}" for name in _defined(tree, "")]
        found.classes |= {f"{module}:{n.name}" for n in tree.body if isinstance(n, ast.ClassDef)}
        if "@chz.chz" in text:
            found.config_modules.append(module)
    return found


def _defined(part: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(part):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from _defined(child, f"{prefix}{child.name}.")


def declared_types(config_modules: list[str]) -> dict[str, object]:
    """The types of all fields that can take a reference; one that may be None, too, is the same."""
    types: dict[str, object] = {"object": object}
    for name in config_modules:
        module = importlib.import_module(name)
        for thing in vars(module).values():
            if isinstance(thing, type) and chz.is_chz(thing):
                for field in chz.chz_fields(thing).values():
                    for inner in _inside(field.x_type):
                        if may_hold_object(inner) or may_be_called(inner):
                            types[str(inner).removesuffix(" | None")] = inner
    return types


def may_hold_object(declared: object) -> bool:
    """Whether an object of some class may stand there, and not plain values alone."""
    plain = (bool, int, float, str, type(None))
    return any(arm in ANYTHING or not _is(arm, plain) for arm in arms(declared))


def _is(arm: object, plain: tuple[type, ...]) -> bool:
    return typing.get_origin(arm) is typing.Literal or arm in plain


def _inside(declared: object) -> Iterator[object]:
    """A type, and those of its items."""
    yield declared
    if typing.get_origin(declared) in (tuple, list, dict, collections.abc.Mapping):
        for inner in typing.get_args(declared):
            yield from _inside(inner)


def holder(number: int, declared: object) -> str:
    """Make a config class with one field of a type; its name."""
    name = f"Holder{number}"
    made = type(name, (), {"__annotations__": {"field": declared}, "__module__": "tests.held"})
    setattr(importlib.import_module("tests.held"), name, chz.chz(made))
    return f"tests.held:{name}"


def main(directory: Path) -> dict[str, object]:
    """Put everything everywhere, and tell what happened."""
    found = found_in_source()
    types = declared_types(found.config_modules)
    sys.modules["tests.held"] = type(sys)("tests.held")
    holders = {holder(i, declared): declared for i, declared in enumerate(types.values())}
    at_the_top = [name for name in found.names if "." not in name.partition(":")[2]]
    callables = found.names
    os.chdir(directory)
    loaded = frozenset(sys.modules)
    events: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if not watching:
            return
        if event in (*RUNS, *REACHES, *CHANGES):
            events.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE:
            events.append(f"open {arguments!r:.200}")

    sys.addaudithook(watch)
    taken: set[str] = set()
    tracebacks: list[str] = []
    tried, watching = 0, True
    for name, declared in holders.items():
        of_class = at_the_top if declared is object else found.classes
        values = [("$class", each) for each in of_class if may_hold_object(declared)]
        if may_be_called(declared):
            values += itertools.product(("$import", "$partial"), callables)
            callables = at_the_top
        for marker, text in values:
            tried += 1
            more = ', "args": [], "keywords": {}' if marker == "$partial" else ""
            config = f'{{"$class": "{name}", "field": {{"{marker}": "{text}"{more}}}}}'
            try:
                config_from_json(config, ["tests"])
                taken.add(f"{marker} {text}")
            except ConfigError as error:
                if _MISSING in str(error):
                    taken.add(f"{marker} {text}")
            except Exception as error:
                tracebacks.append(f"{config} in {declared}: {type(error).__name__} {error}")
    watching = False
    return {
        "tried": tried,
        "events": events,
        "imported": sorted(set(sys.modules) - loaded),
        "tracebacks": tracebacks,
        "taken": sorted(taken),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
