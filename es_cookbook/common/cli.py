"""The command line around a config: `run_cli(main, CLIConfig)`.

Options are chz's: `name=value`, nested with dots, in any order (`engine=torch
optimizer.learning_rate=5e-4`), or in a file (`config=run.yaml`). chz builds the config; this module
says first, in one sentence, what is wrong with an option and what would be right, and prints a help
page that shows every option with its value and its one line of documentation.

Exit codes: 0 done, 1 a mistake that the run found (one sentence on stderr), 2 an option that is not
one, 130 Ctrl-C or SIGTERM, 141 nobody reads stdout any more. An error nobody foresaw keeps its
traceback: that is a bug.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import shlex
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import chz

from es_cookbook.common.errors import (
    ConfigError,
    ESCookbookError,
    closest,
    leaves,
    nearest,
)
from es_cookbook.common.fields.chz_fields import (
    CHZ_ERRORS,
    MISSING,
    CastError,
    Field,
    Reference,
    cast_text,
    default_of,
    path_of_failure,
)
from es_cookbook.common.fields.options import (
    Option,
    OptionError,
    each_option,
    expanded,
    flat,
    is_inside,
    literals_of,
    names_of,
    of_yaml,
    options_for,
    part_at,
    part_of,
    spelled_out,
    switched_on,
    values_of,
)
from es_cookbook.common.machine.exits import INTERRUPTED, interrupted, leave
from es_cookbook.common.names import Names
from es_cookbook.common.references import refuse_while_imported
from es_cookbook.common.terminal import (
    as_program,
    handled,
    is_utf8,
    printable,
    program,
    say_once,
    screen,
    until_stdout_closes,
)

_Config = TypeVar("_Config")
_HELP = ("--help", "-h")
UNNAMED = {"unnamed": True}
"""Metadata of the field whose values a user may type without its name: `show runs/mine`."""
_DOC_COLUMN = 46


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """Options that a name stands for, where a config class has `presets` by name.

    Attributes:
        options: as a user would type them.
        source: where they are from.
    """

    options: Mapping[str, str]
    source: str


def arguments(argv: Sequence[str] | None = None) -> list[str]:
    """What was typed (`argv`, this process's if None), options of `config=FILE` before all others.

    Raises:
        SystemExit: A file cannot be read as options; says why.
    """
    with mistakes_exit():
        words = sys.argv[1:] if argv is None else argv
        for word in words:
            if not is_utf8(word):
                raise OptionError(f"an option must be text in UTF-8, found {word!r}")
        return expanded(words)


def run_cli(
    main: Callable[[_Config], object],
    config: type[_Config] | _Config,
    argv: Sequence[str] | None = None,
    more_help: str = "",
) -> None:
    """Build a chz config from the command line (`argv`, this process's if None) and run `main`.

    `config` is its class, or a config that options change: what is not given stays as it is there.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    words = arguments(argv)
    with mistakes_exit():
        given = _parse([each for each in words if each not in _HELP], unnamed_field(config))
        with until_stdout_closes(), as_program():
            if any(word in _HELP for word in words):
                print(help_page(config, given) + more_help)
                return
            with sigterm_interrupts():
                if isinstance(config, type):
                    whole = built(cast("type[_Config]", config), given)
                else:
                    whole = changed(config, given)
            main(whole)


def run_with_fields(
    main: Callable[[_Config, dict[str, str]], object],
    config_class: type[_Config],
    more_help: str,
    argv: Sequence[str] | None = None,
) -> None:
    """The same for a command that takes options of a run's Config, too; `main` gets them as typed.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    own, fields = split_options(config_class, argv)
    run_cli(lambda config: main(config, fields), config_class, own, more_help)


def sigterm_interrupts() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does: what was begun is cleaned up."""
    return handled((signal.SIGTERM,), signal.default_int_handler)


@contextlib.contextmanager
def mistakes_exit() -> Generator[None]:
    """Inside, what the user can put right ends the program with its sentence on stderr.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    refuse_while_imported()
    interrupted.clear()
    try:
        yield
    except BaseException as error:
        errors = list(leaves(error))
        for each in errors:
            if isinstance(each, KeyboardInterrupt):
                _say_last(str(each) or "interrupted")
                if interrupted.is_set():
                    leave(INTERRUPTED)
                raise SystemExit(INTERRUPTED) from None
        if all(isinstance(each, ESCookbookError) for each in errors):
            _say_last(str(errors[0]))
            raise SystemExit(2 if isinstance(errors[0], OptionError) else 1) from None
        raise


def options_file(config: object, without: Collection[str] = ()) -> str | None:
    """A YAML file of the options that make a config, `without` some that have defaults.

    None if no options make it: it holds what cannot be typed, such as a function of a script.
    """
    import yaml

    options = {name: v for name, v in options_for(config).items() if name not in without}
    text = yaml.safe_dump(options, sort_keys=False, allow_unicode=True, width=math.inf)
    try:
        made, _ = _made(type(config), dict(flat(of_yaml(text), "")), None)
    except ESCookbookError:
        return None
    same = chz.replace(made, **{name: getattr(config, name) for name in without})
    return text if same == config else None


def split_options(
    config_class: type, argv: Sequence[str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Options of a config class, for `run_cli`, and all others, for `changed`.

    What is behind a name that is a text, as in `second.seed` of a `second: str`, is another's.
    """
    own: list[str] = []
    others: dict[str, str] = {}
    fields = chz.chz_fields(config_class)
    for argument in arguments(argv):
        name, equals, value = argument.lstrip("-").partition("=")
        is_option = equals and not _is_path(argument)
        field = fields.get(name.partition(".")[0])
        is_others = field is None or ("." in name and field.x_type is str)
        if is_option and is_others:
            others[name] = value
        else:
            own.append(argument)
    return own, others


def changed(config: _Config, given: Mapping[str, str]) -> _Config:
    """A config with some of its options changed, as a user types them; only inside `run_cli`.

    A part keeps its class unless that is what changes; a new class has its own defaults.
    """
    if for_chz := next(filter(_is_for_chz, given), None):
        raise OptionError(f"{for_chz}: a change is given by the option's whole name")
    return built(type(config), given, config)


def help_page(config: object, given: Mapping[str, str]) -> str:
    """Every option with the value it has now, its one-line doc, and what it accepts.

    `config` is a class, or a config whose values they are.
    """
    config_class = config if isinstance(config, type) else type(config)
    given = _with_preset(config_class, given)
    values = {} if config is config_class else values_of(config)
    given = spelled_out(config_class, given, values, kept=config is not config_class)
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    summary = (config_class.__doc__ or "").strip().partition("\n\n")[0]
    lines = [
        f"usage: {program()} {_unnamed_usage(config)}[name=value ...]",
        "",
        *textwrap.wrap(" ".join(summary.split()), width),
        "",
        "Options, with the values they have now:",
        "",
    ]
    for option in each_option(config_class, "", given, values, kept=config is not config_class):
        value = "(required)" if option.value is None else option.value.replace("\n", r"\n")
        left = f"  {option.path}={value}"
        right = textwrap.wrap(
            f"{option.doc} [{option.accepts}]".strip(),
            width=max(width - _DOC_COLUMN, 30),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(left) > _DOC_COLUMN - 2:
            right.insert(0, "")
        pairs = itertools.zip_longest([left], right, fillvalue="")
        lines += [f"{start:<{_DOC_COLUMN}}{end}".rstrip() for start, end in pairs]
    if presets := _presets_of(config_class):
        lines += ["", f"Settings of papers: preset={'|'.join(presets)}"]
    lines += ["", "config=FILE takes options from a .yaml or .toml file; those typed change them."]
    return "\n".join(lines)


def unnamed_field(config: object) -> Field | None:
    """The field whose values may be typed without its name, if a config or a class has one."""
    fields = chz.chz_fields(cast("type", config)).values()
    return next((field for field in fields if "unnamed" in (field.metadata or {})), None)


def _parse(arguments: Sequence[str], unnamed: Field | None) -> dict[str, str]:
    """Options by name; several values of the field without a name are one, with commas."""
    given: dict[str, str] = {}
    paths: list[str] = []
    of_paths = unnamed.logical_name if unnamed else ""
    several = unnamed is not None and _holds_several(unnamed)
    bare = [each for each in arguments if _is_bare(each)] if unnamed else []
    if len(bare) > 1 and not several:
        raise OptionError(f"{of_paths} is one path here, found {' and '.join(bare)}")
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument in bare or (of_paths and name.lstrip("-") == of_paths):
            paths.append(argument if argument in bare else value)
        elif not equals:
            raise OptionError(
                f"an option is written name=value, found {argument!r}; --help lists them"
            )
        else:
            given[name.lstrip("-")] = value
    if paths:
        given[of_paths] = ",".join(paths) if several else paths[-1]
    return given


def _is_bare(argument: str) -> bool:
    return _is_path(argument) or not ("=" in argument or argument.startswith("-"))


def _is_path(argument: str) -> bool:
    """Whether it is a path: no option has a slash in its name, and directories may have a `=`."""
    return "/" in argument.partition("=")[0]


def _holds_several(field: Field) -> bool:
    return typing.get_origin(field.x_type) is tuple


def _is_for_chz(path: str) -> bool:
    """Whether it is one of chz's wildcards or references, which chz explains itself."""
    return "..." in path or path.endswith("@")


def built(
    config_class: type[_Config], given: Mapping[str, str], config: _Config | None = None
) -> _Config:
    """A config of a class from options as a user types them; only inside `run_cli`.

    Every option is checked by name and by value, then chz builds the config. What is not given is
    as in `config`, or has the class's defaults.
    """
    given = _with_preset(config_class, given)
    values = {} if config is None else values_of(config)
    given = spelled_out(config_class, given, values, kept=config is not None)
    made, options = _made(config_class, given, config)
    for path, text in given.items():
        names = options[path].field.meta_factory if path in options else None
        if isinstance(names, Names) and options[path].part:
            inside = {other.removeprefix(f"{path}.") for other in given}
            if note := names.note(part_at(made, path), inside):
                say_once(f"{path}={text}: {note}")
    return made


def _made(
    config_class: type[_Config], given: Mapping[str, str], config: _Config | None
) -> tuple[_Config, Mapping[str, Option]]:
    """The config that `built` returns, and its options by path."""
    values = {} if config is None else values_of(config)
    found = each_option(config_class, "", given, values, kept=config is not None)
    options = {option.path: option for option in found}
    for path, text in given.items():
        if path in options:
            _check_value(options[path], text)
        elif not _is_for_chz(path):
            hint = _suggested(path, text, options, given, config is not None)
            raise OptionError(f"unknown option {path!r}{hint or ';'} --help lists all")
    missing = [f"{path}=..." for path, option in options.items() if option.value is None]
    if missing and not any("..." in path for path in given):
        raise OptionError(f"missing {', '.join(missing)}; --help lists all options")
    kept = {} if config is None else _kept(config, "", given)
    typed = {
        path.removesuffix("@"): Reference(text)
        if path.endswith("@")
        else (path in options and switched_on(options[path].field, text)) or chz.Castable(text)
        for path, text in given.items()
    }
    blueprint = chz.Blueprint(config_class).apply(kept, layer_name="as it was")
    try:
        return blueprint.apply(typed, layer_name="command line").make(), options
    except CHZ_ERRORS as error:
        raise OptionError(" ".join(str(error).split())) from error
    except (ESCookbookError, ValueError, TypeError) as error:  # From a config's own validators.
        sentence = _located(" ".join(str(error).split()), path_of_failure(error), options)
        kind = type(error) if isinstance(error, ESCookbookError) else ConfigError
        raise kind(sentence) from error


def _presets_of(config_class: type) -> Mapping[str, Preset]:
    return getattr(config_class, "presets", {})


def _with_preset(config_class: type, given: Mapping[str, str]) -> Mapping[str, str]:
    """Options with those of the preset that is given behind them; says which of it are replaced."""
    presets, name = _presets_of(config_class), given.get("preset")
    if name is None or not presets:
        return given
    if name not in presets:
        raise OptionError(f"preset={name}: {nearest(name, presets)}")
    own = {path: text for path, text in given.items() if path != "preset"}
    options = presets[name].options
    replaced = [path for path, text in options.items() if own.get(path, text) != text]
    # Another part has other options.
    kept = {
        path: text
        for path, text in options.items()
        if not any(path.startswith(f"{part}.") for part in replaced)
    }
    if replaced:
        which = ", ".join(f"{path}={own[path]} in place of {options[path]}" for path in replaced)
        say_once(f"preset={name}: {which}; this is no longer what {presets[name].source} describes")
    return {**kept, **own}


def _located(sentence: str, part: str, options: Iterable[str]) -> str:
    """What the class of a part says of its fields, with the fields' names as a user types them.

    A class does not know where it stands in a config. Its sentences begin with a field, bare or
    behind the name that its part usually has, and show values as `field=value`.
    """
    own = (path.removeprefix(f"{part}.") for path in options if path.startswith(f"{part}."))
    fields = "|".join(sorted({re.escape(name.partition(".")[0]) for name in own}))
    if not part or not fields:
        return sentence
    first, values = rf"^(?:\w+\.)*(?=(?:{fields})\b)", rf"(?<![\w.])(?=(?:{fields})\b[\w.]*=)"
    sentence = re.sub(f"{first}|{values}", f"{part}.", sentence)
    return sentence if part in sentence else f"{part}: {sentence}"


def _suggested(
    path: str, text: str, options: Mapping[str, Option], given: Mapping[str, str], kept: bool
) -> str:
    """A clause that says what an unknown option may stand for; nothing where nothing is near.

    That is an option of the same name, or else one that is spelled alike: where the path leads if
    another part is chosen, in the parts that are chosen now, or in any other.
    """
    others = sorted(_elsewhere(options.values(), given, kept), key=lambda other: len(other[0]))
    elsewhere: dict[str, Sequence[str]] = {}
    for chosen, paths in others:
        elsewhere |= {each: chosen for each in paths if each not in elsewhere}
    nearest_path = path if path in elsewhere else closest(path, [*options, *elsewhere])
    if nearest_path is None:
        return ""
    if nearest_path in options:
        return f"; did you mean {nearest_path!r}?"
    elsewhere_said = shlex.join([*elsewhere[nearest_path], f"{nearest_path}={text}"])
    return f"{_lacking(path, options)}; did you mean {elsewhere_said}?"


def _lacking(path: str, options: Mapping[str, Option]) -> str:
    """A clause that says which chosen part has no such option, and the one most like it."""
    part = path.rpartition(".")[0]
    if part not in options or not options[part].part:
        return ""
    own = [each.rpartition(".")[2] for each in options if each.rpartition(".")[0] == part]
    alike = closest(path.rpartition(".")[2], own)
    instead = f" (it has {alike})" if alike else ""
    return f", which {part}={options[part].value} does not have{instead}"


def _elsewhere(
    options: Iterable[Option],
    given: Mapping[str, str],
    kept: bool,
    before: Sequence[str] = (),
) -> Iterator[tuple[Sequence[str], Mapping[str, Option]]]:
    """Options that choose other parts than now, and the options that there are in those then.

    Parts that cannot be imported here are left out. A part of a part is looked into, no deeper.
    """
    for option in options:
        factory, choices = option.field.meta_factory, list[tuple[str, str]]()
        if names := names_of(option.field):
            choices = [(option.path, name) for name in names if name != option.value]
        elif factory is not None and not option.part:  # Any option inside chooses it.
            choices = [(f"{option.path}.", "")]
        for choice, text in choices:
            chosen = [*before, f"{choice}={text}"] if text else before
            with_it = {**given, choice: text}
            own = [item for item in with_it.items() if f"{item[0]}.".startswith(f"{option.path}.")]
            try:
                inside = _options_inside(option.field, option.path, tuple(own), kept)
            except OptionError:
                continue
            if inside:
                yield chosen, inside
                if not before:
                    yield from _elsewhere(inside.values(), with_it, kept, chosen)


@functools.cache
def _options_inside(
    field: Field, path: str, own: Sequence[tuple[str, str]], kept: bool
) -> Mapping[str, Option]:
    """The options of the part that a field holds with these of its own."""
    part, values = part_of(field, path, dict(own), MISSING, kept)
    found = each_option(part, f"{path}.", dict(own), values, kept) if part else ()
    return {each.path: each for each in found}


def _kept(part: object, prefix: str, given: Mapping[str, str]) -> dict[str, object]:
    """What stays of a config: whole values, and the classes of parts that change inside."""
    values: dict[str, object] = {}
    for name, value in values_of(part).items():
        path = prefix + name
        if path in given:
            continue
        if not is_inside(path, given):
            values[path] = value
        elif chz.is_chz(value):
            values |= {path: type(value), **_kept(value, path + ".", given)}
    return values


def _check_value(option: Option, text: str) -> None:
    if option.part:
        return
    try:
        cast_text(option.field, text)
    except CastError as error:
        literals = literals_of(option.field)
        accepted = nearest(text, literals) if literals else f"it must be {option.accepts}"
        raise OptionError(f"{option.path}={text}: {accepted}") from error


def _unnamed_usage(config: object) -> str:
    field = unnamed_field(config)
    if field is None:
        return ""
    path = "PATH ... " if _holds_several(field) else "PATH "
    return path if default_of(field) is MISSING else f"[{path.strip()}] "


def _say_last(sentence: str) -> None:
    print(printable(sentence), file=screen())  # A thread may have redirected stderr.
