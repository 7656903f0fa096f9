"""The command line around a config: `run_cli(main, CLIConfig)`.

Options are chz's: `name=value`, nested with dots, in any order (`engine=torch
optimizer.learning_rate=5e-4`), or in a file (`config=run.yaml`). chz builds the config. This module
adds error messages that name the nearest valid option, a help page, and what a config class may
declare: a field whose values need no name (`UNNAMED`), `common_options`, which `--help` shows, and
`whole_options`, a class method that expands short names and presets.

Exit codes: 0 success, 1 a mistake found by the run (one sentence on stderr), 2 an invalid option,
130 Ctrl-C or SIGTERM, 141 stdout was closed by its reader. An unexpected error keeps its traceback:
it is a bug.
"""

import contextlib
import re
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import chz

from es_cookbook.common.errors import ESCookbookError, leaves
from es_cookbook.common.options import (
    Option,
    OptionError,
    blueprint_of,
    built,
    options_in,
    whole_options,
)
from es_cookbook.common.terminal import (
    INTERRUPTED,
    as_program,
    handled,
    interrupted,
    leave,
    printable,
    program,
    screen,
    until_stdout_closes,
)
from es_cookbook.common.trust import refuse_while_imported

_Config = TypeVar("_Config")
_HELP = ("--help", "-h")
UNNAMED = {"unnamed": True}
"""Metadata of the field whose values a user may type without its name: `show runs/mine`."""
_DOC_COLUMN = 46


def run_cli(
    main: Callable[[_Config], object],
    config: type[_Config] | _Config,
    argv: Sequence[str] | None = None,
    more_help: str = "",
) -> None:
    """Build a chz config from the command line (`argv`, this process's if None) and run `main`.

    `config` is its class, or a config whose values are the defaults of the options.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    run_with_fields(lambda whole, _: main(whole), config, more_help, argv, splits=False)


def run_with_fields(
    main: Callable[[_Config, dict[str, str]], object],
    config: type[_Config] | _Config,
    more_help: str = "",
    argv: Sequence[str] | None = None,
    *,
    splits: bool = True,
) -> None:
    """Run a command that also takes options of a run's Config; `main` gets these as typed.

    `splits`: whether it takes them.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    with mistakes_exit():
        words = arguments(argv)
        given, fields = typed_options(words, config), dict[str, str]()
        if splits:
            given, fields = split_options(given, config)
        with until_stdout_closes(), as_program():
            if any(word in _HELP for word in words):
                print(help_page(config, given, everything="all" in words) + more_help)
                return
            with sigterm_interrupts():
                whole = built(config, given)
            main(whole, fields)


def sigterm_interrupts() -> contextlib.AbstractContextManager[None]:
    """Return a context in which SIGTERM raises `KeyboardInterrupt`, so that cleanup runs."""
    return handled((signal.SIGTERM,), signal.default_int_handler)


@contextlib.contextmanager
def mistakes_exit() -> Generator[None]:
    """End the program with one sentence on stderr if a user's mistake is raised inside.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    refuse_while_imported()
    interrupted.clear()
    try:
        yield
    except BaseException as error:
        errors = list(leaves(error))
        stops = [each for each in errors if isinstance(each, KeyboardInterrupt)]
        if not stops and not all(isinstance(each, ESCookbookError) for each in errors):
            raise
        said = str((stops or errors)[0]) or "interrupted"
        print(printable(said), file=screen())  # A thread may have redirected stderr.
        if interrupted.is_set() and stops:
            leave(INTERRUPTED)
        code = 2 if isinstance(errors[0], OptionError) else 1
        raise SystemExit(INTERRUPTED if stops else code) from None


def arguments(argv: Sequence[str] | None = None) -> list[str]:
    """Return the arguments (of this process if None), the options of `config=FILE` first.

    Raises:
        ConfigError: A file cannot be read as options.
    """
    words = _joined(sys.argv[1:] if argv is None else argv)
    files = [word for word in words if word.lstrip("-").startswith("config=")]
    of_files = [options_in(Path(word.partition("=")[2])) for word in files]
    typed = [word for word in words if word not in files]
    return [f"{path}={text}" for each in of_files for path, text in each.items()] + typed


def _joined(words: Sequence[str]) -> list[str]:
    """Read `--name value`, which other programs take, as `name=value`."""
    found: list[str] = []
    for word in words:
        name = re.fullmatch(r"--(?!help$)([A-Za-z][\w.-]*)", found[-1] if found else "")
        if name and not re.match(r"--[A-Za-z]|[A-Za-z_][\w.]*=", word):
            found[-1] = f"{name[1].replace('-', '_')}={word}"
        else:
            found.append(word)
    return found


def typed_options(words: Sequence[str], config: object) -> dict[str, str]:
    """Return the options by path; several values of the unnamed field are joined by commas.

    Raises:
        OptionError: A word is not an option.
    """
    skipped = (*_HELP, "all") if any(word in _HELP for word in words) else ()
    unnamed, holds_several = _unnamed(config)
    given: dict[str, str] = {}
    bare: list[str] = []
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if word in skipped:
            continue
        if unnamed and ("/" in name or not (equals or word.startswith("-"))):
            bare.append(word)  # Directories may have a "=" in their names, options no slash.
            name, value = unnamed, word
        elif not equals:
            raise OptionError(f"an option is written name=value, found {word!r}; --help lists them")
        is_more = holds_several and name == unnamed and name in given
        given[name] = f"{given[name]},{value}" if is_more else value
    if len(bare) > 1 and not holds_several:
        raise OptionError(f"{unnamed} is one path here, found {' and '.join(bare)}")
    return given


def split_options(
    given: Mapping[str, str], config: object
) -> tuple[dict[str, str], dict[str, str]]:
    """Split options into those of a config and others, for `built`.

    If a field is a string, as `second: str`, then `second.seed` is not an option of this config.
    """
    own, others = dict[str, str](), dict[str, str]()
    fields = chz.chz_fields(config)
    for path, text in given.items():
        name, dot, _ = path.partition(".")
        is_own = name in fields and not (dot and fields[name].x_type is str)
        (own if is_own else others)[path] = text
    return own, others


def help_page(config: object, given: Mapping[str, str], everything: bool = True) -> str:
    """Return a page with the options, their current values and docs, and what they accept.

    Args:
        config: a class, or a config.
        given: options of it.
        everything: whether to show all options, not only the class's `common_options` and those of
            a part that is chosen.
    """
    typed, given = given, whole_options(config, given)
    _, options = blueprint_of(config, given)
    often: Collection[str] = getattr(config, "common_options", options)
    shown = [
        option
        for path, option in options.items()
        if everything
        or path in often
        or path in given
        or path.rpartition(".")[0] in typed
        or option.value is None
    ]
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 120), _DOC_COLUMN + 30)
    summary = (config.__doc__ or "").strip().partition("\n\n")[0]
    unnamed, holds_several = _unnamed(config)
    path = f"PATH {'... ' * holds_several}" if unnamed else ""
    lines = [
        f"usage: {program()} {path}[name=value ...]",
        "",
        *textwrap.wrap(" ".join(summary.split()), width),
        "",
        "Options, with the values they have now:",
        "",
    ]
    for option in shown:
        lines += _row(option, width)
    if others := len(options) - len(shown):
        lines += ["", f"--help all lists the other {others} options, too."]
    return "\n".join([*lines, "", "config=FILE takes options from a YAML file; typed ones win."])


def _row(option: Option, width: int) -> list[str]:
    value = "(required)" if option.value is None else option.value.replace("\n", r"\n")
    left = f"  {option.path}={value}"
    doc = f"{option.doc} [{option.accepts}]".strip()
    lines = textwrap.wrap(doc, width - _DOC_COLUMN, break_long_words=False, break_on_hyphens=False)
    if len(left) > _DOC_COLUMN - 2:
        return [left, *textwrap.indent("\n".join(lines), " " * _DOC_COLUMN).splitlines()]
    return [f"{left if n == 0 else '':{_DOC_COLUMN}}{line}" for n, line in enumerate(lines)]


def _unnamed(config: object) -> tuple[str, bool]:
    """Return the field whose values need no name ("" if none), and whether it holds several."""
    for name, field in chz.chz_fields(config).items():
        if "unnamed" in (field.metadata or {}):
            return name, typing.get_origin(field.x_type) is tuple
    return "", False
