"""The command line: what people do with a run, and how the commands of all parts are found.

`main` runs a command, or a recipe, by its name.
"""

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.registry import Registered, is_own, part
from es_cookbook.common.terminal import INTERRUPTED, handled, program, until_stdout_closes
from es_cookbook.common.trust import load, source_of

if TYPE_CHECKING:
    from es_cookbook.runs.config import Config

COMMANDS = Registered("commands")
"""Name -> "module:function"."""
RECIPES = Registered("recipes")
"""Name -> "module:CLIConfig"."""
_ALIASES = {"continue": "resume", "extend": "resume"}
"""Names that people may look for -> names of commands."""
_FIRST_LINE = re.compile(r'r?"""(.*?)(?:\.?"""|\.?\n|[:;,] )')


def main() -> None:
    """Run the command or the recipe that is named first; without one, list them."""
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        with until_stdout_closes():
            print(_overview())
        return
    try:
        with handled((signal.SIGINT, signal.SIGTERM), _end_at_once):  # Imports take a second.
            command = command_of(name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv = [f"{sys.argv[0]} {name}", *options]
    command()


def _end_at_once(*_: object) -> None:
    os.write(2, b"interrupted; nothing has changed: run the same command again\n")
    os._exit(INTERRUPTED)


def command_of(name: str) -> Callable[[], object]:
    """Return the function of a command or a recipe; it reads its options from `sys.argv`.

    Raises:
        ConfigError: There is none of that name; or its distribution is made for another version of
            the interface, or cannot be imported.
    """
    if name in COMMANDS:
        registered = part("commands", name)
    elif name in RECIPES:
        registered = part("recipes", name)
    else:
        found = nearest(_ALIASES.get(name, name), [*COMMANDS, *RECIPES])
        raise ConfigError(f"unknown command {name!r}: {found}")
    if is_own(registered):  # A mistake in its own code keeps its traceback.
        module, _, attribute = registered.value.partition(":")
        found = getattr(importlib.import_module(module), attribute)
    else:
        found = load(registered.value)
    if name not in COMMANDS:
        from es_cookbook.runs.program import program as program_of  # It imports a run's parts.

        return program_of(name, cast("type[Config]", found))[1]
    return cast("Callable[[], object]", found)


def _overview() -> str:
    lines = [f"usage: {program()} COMMAND [name=value ...]", ""]
    own = {name for name in COMMANDS if COMMANDS[name].startswith(f"{__name__}.")}
    for title, registered, names in (
        ("Commands", COMMANDS, sorted(own, key=_place)),
        ("Commands of plug-ins", COMMANDS, sorted(COMMANDS.keys() - own)),
        ("Recipes", RECIPES, sorted(RECIPES)),
    ):
        lines += [f"{title}:", ""]
        lines += [f"  {name:<19}{summary(registered[name])}" for name in names]
        lines += [""]
    return "\n".join([*lines, "COMMAND --help lists its options, with their values."])


def _place(name: str) -> int:
    order = ("train", "resume", "fork", "rewind", "play", "runs", "show", "evaluate", "export")
    return order.index(name) if name in order else len(order)


def summary(value: str) -> str:
    """Return the first line of the docs of "module:name" without its capital and full stop.

    It is read, not imported. A recipe's is that of its package.
    """
    module = value.partition(":")[0]
    if module.endswith(".train_cli"):
        module = module.rpartition(".")[0]
    file = source_of(module)
    try:
        text = "" if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    if not text:
        return "(cannot be found)"
    line = "".join(_FIRST_LINE.findall(text)[:1])
    return line[:1].lower() + line[1:]
