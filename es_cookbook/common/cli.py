"""The command line around a config: `run_cli(main, CLIConfig)`.

Options are chz's: `name=value`, nested with dots, in any order (`engine=torch
optimizer.learning_rate=5e-4`). chz builds the config; this module says first, in one sentence, what
is wrong with an option and what would be right, and prints a help page that shows every option with
its value and its one line of documentation.

Exit codes: 0 done, 1 a mistake that the run found (one sentence on stderr), 2 an option that is not
one, 130 Ctrl-C. An error nobody foresaw keeps its traceback: that is a bug.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import NoReturn, TypeVar, cast

import chz
import chz.factories
from chz.blueprint import (
    Castable,
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
from chz.field import Field
from chz.tiepin import CastError, type_repr
from chz.util import MISSING

from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, ESCookbookError, nearest
from es_cookbook.common.terminal import program, until_stdout_closes

# chz tells a field's default and doc to no one but itself; pyproject bounds chz for that.
# pyright: reportPrivateUsage=false

_Config = TypeVar("_Config")
_HELP = ("--help", "-h")
_CHZ_ERRORS = (
    ConstructionException,
    ExtraneousBlueprintArg,
    InvalidBlueprintArg,
    MissingBlueprintArg,
)
_DOC_COLUMN = 46


def run_cli(
    main: Callable[[_Config], None],
    config_class: type[_Config],
    argv: Sequence[str] | None = None,
    more_help: str = "",
) -> None:
    """Build a config from the command line and run `main` with it.

    Args:
        main: what to do.
        config_class: the chz class of the config.
        argv: options without the program's name; those of this process when None.
        more_help: what else the help page says.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        given = _parse([argument for argument in arguments if argument not in _HELP])
        with until_stdout_closes():
            if any(argument in _HELP for argument in arguments):
                print(help_page(config_class, given) + more_help)
            else:
                main(_build(config_class, given))
    except _OptionError as error:
        _exit(str(error), 2)
    except ESCookbookError as error:
        _exit(str(error), 1)
    except KeyboardInterrupt as error:
        _exit(str(error) or "interrupted", 130)
    except BaseExceptionGroup as group:  # How structured concurrency wraps what its tasks raise.
        leaves = list(_leaves(group))
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            _exit("interrupted", 130)
        if all(isinstance(leaf, ESCookbookError) for leaf in leaves):
            _exit(str(leaves[0]), 1)
        raise


def split_options(
    config_class: type, argv: Sequence[str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Options of a config class, for `run_cli`, and all others, for `changed`."""
    own: list[str] = []
    others: dict[str, str] = {}
    for argument in sys.argv[1:] if argv is None else argv:
        name, equals, value = argument.lstrip("-").partition("=")
        if equals and name.partition(".")[0] not in chz.chz_fields(config_class):
            others[name] = value
        else:
            own.append(argument)
    return own, others


def changed(config: _Config, given: Mapping[str, str]) -> _Config:
    """A config with some of its options changed, as a user types them; only inside `run_cli`.

    A part keeps its class unless that is what changes; a new class has its own defaults.
    """
    config_class = type(config)
    for path in given:
        if "..." in path or path.endswith("@"):
            raise _OptionError(f"{path}: a change is given by the option's whole name")
    _check(config_class, given, _values(config), kept=True)
    return _make(config_class, _kept(config, "", given), given)


def help_page(config_class: type, given: Mapping[str, str]) -> str:
    """Every option with the value it has now, its one-line doc, and what it accepts."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    summary = (config_class.__doc__ or "").strip().partition("\n\n")[0]
    lines = [
        f"usage: {program()} [name=value ...]",
        "",
        *textwrap.wrap(" ".join(summary.split()), width),
        "",
        "Options, with the values they have now:",
        "",
    ]
    for option in _options(config_class, "", given, {}):
        left = f"  {option.path}={'(required)' if option.value is None else option.value}"
        right = textwrap.wrap(
            f"{option.doc} [{option.accepts}]".strip(),
            width=max(width - _DOC_COLUMN, 30),
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(left) > _DOC_COLUMN - 2:
            lines.append(left)
            left = ""
        for line in right:
            lines.append(left.ljust(_DOC_COLUMN) + line)
            left = ""
    return "\n".join(lines)


class _OptionError(Exception):
    """An option that is not one; its argument is the sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """One option.

    Attributes:
        path: its whole name.
        field: chz's description of it.
        value: what a user would type for the value that it has now; None when it must be given.
        accepts: what it accepts, in brackets on the help page.
        part: whether the value is the name of a class with options of its own.
    """

    path: str
    field: Field
    value: str | None
    accepts: str
    part: bool

    @property
    def doc(self) -> str:
        """Its one line of documentation."""
        return self.field._doc


def _parse(arguments: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise _OptionError(
                f"an option is written name=value, found {argument!r}; --help lists them"
            )
        given[name.lstrip("-")] = value
    return given


def _build(config_class: type[_Config], given: Mapping[str, str]) -> _Config:
    """Check every option by name and by value, then let chz build the config."""
    _check(config_class, given, {}, kept=False)
    return _make(config_class, {}, given)


def _check(
    config_class: type, given: Mapping[str, str], values: Mapping[str, object], kept: bool
) -> None:
    options = {option.path: option for option in _options(config_class, "", given, values, kept)}
    for path, text in given.items():
        if "..." in path or path.endswith("@"):
            continue  # chz's wildcards and references; chz explains them itself.
        if path not in options:
            raise _OptionError(f"unknown option {path!r}{_hint(path, options)} --help lists all")
        _check_value(options[path], text)
    missing = [path for path, option in options.items() if option.value is None]
    if missing and not any("..." in path for path in given):
        raise _OptionError(
            f"missing {', '.join(f'{path}=...' for path in missing)}; --help lists all options"
        )


def _make(
    config_class: type[_Config], kept: Mapping[str, object], given: Mapping[str, str]
) -> _Config:
    blueprint = chz.Blueprint(config_class).apply(dict(kept), layer_name="as it was")
    values: dict[str, object] = {
        path.removesuffix("@"): chz.blueprint.Reference(text)
        if path.endswith("@")
        else Castable(text)
        for path, text in given.items()
    }
    try:
        return blueprint.apply(values, layer_name="command line").make()
    except _CHZ_ERRORS as error:
        raise _OptionError(" ".join(str(error).split())) from error
    except ESCookbookError:
        raise
    except (ValueError, TypeError) as error:  # From a config's own validators.
        raise ConfigError(" ".join(str(error).split())) from error


def _kept(part: object, prefix: str, given: Mapping[str, str]) -> dict[str, object]:
    """What stays of a config: whole values, and the classes of parts that change inside."""
    values: dict[str, object] = {}
    for name, value in _values(part).items():
        path = prefix + name
        if path in given:
            continue
        if not any(key.startswith(path + ".") for key in given):
            values[path] = value
        elif chz.is_chz(value):
            values |= {path: type(value), **_kept(value, path + ".", given)}
    return values


def _values(config: object) -> dict[str, object]:
    return {name: getattr(config, field.x_name) for name, field in chz.chz_fields(config).items()}


def _options(
    config_class: type,
    prefix: str,
    given: Mapping[str, str],
    values: Mapping[str, object],
    kept: bool = False,
) -> Iterator[_Option]:
    """All options of a config class and of the parts that it now has, in order.

    Args:
        config_class: a chz class.
        prefix: what stands before its fields' names.
        given: options that the user gave.
        values: where this instance differs from the class's own defaults.
        kept: whether a part of these values stays when options inside of it change.
    """
    for name, field in chz.chz_fields(config_class).items():
        path = prefix + name
        value = values[name] if name in values else _default(field)
        part, part_values = _part(field, path, given, value, kept)
        if part is None:
            text = given.get(path, None if value is MISSING else _text(value))
        else:
            text = _name_of(field, part)
        yield _Option(path, field, text, _accepts(field), part is not None)
        if part is not None:
            yield from _options(part, path + ".", given, part_values, kept)


def _default(field: Field) -> object:
    factory = field._default_factory
    return field._default if factory is MISSING else cast("Callable[[], object]", factory)()


def _part(
    field: Field, path: str, given: Mapping[str, str], value: object, kept: bool
) -> tuple[type | None, Mapping[str, object]]:
    """The chz class that a field holds now, and where it differs from that class's defaults."""
    meta_factory = field.meta_factory
    factory: object = None
    if meta_factory is not None and path in given:
        try:
            meta_factory.perform_cast(given[path])
        except CastError:
            if isinstance(meta_factory, Names) or _holds_chz(field):
                try:
                    factory = meta_factory.from_string(given[path])
                except (chz.factories.MetaFromString, ConfigError) as error:
                    raise _OptionError(f"{path}={given[path]}: {error}") from error
    elif kept and chz.is_chz(value):
        return type(value), _values(value)
    elif meta_factory is not None and (
        value is MISSING or any(key.startswith(path + ".") for key in given)
    ):
        factory = meta_factory.unspecified_factory()
    elif chz.is_chz(value):
        return type(value), _values(value)
    settings: Mapping[str, object] = {}
    if isinstance(factory, functools.partial):
        bound = cast("functools.partial[object]", factory)
        factory, settings = bound.func, bound.keywords
    is_part = isinstance(factory, type) and chz.is_chz(factory) and not inspect.isabstract(factory)
    return (cast(type, factory), settings) if is_part else (None, {})


def _holds_chz(field: Field) -> bool:
    """Whether a field without `Names` is typed as a chz class (or that or None)."""
    kinds = typing.get_args(field.x_type) or (field.x_type,)
    return any(chz.is_chz(kind) for kind in kinds)


def _check_value(option: _Option, text: str) -> None:
    meta_factory = option.field.meta_factory
    if option.part or meta_factory is None:
        return
    try:
        (option.field._blueprint_cast or meta_factory.perform_cast)(text)
    except CastError as error:
        literals = [str(value) for value in typing.get_args(option.field.x_type)]
        if typing.get_origin(option.field.x_type) is typing.Literal:
            accepted = nearest(text, literals)
        else:
            accepted = f"it must be {option.accepts}"
        raise _OptionError(f"{option.path}={text}: {accepted}") from error


def _accepts(field: Field) -> str:
    if isinstance(field.meta_factory, Names):
        return "|".join(field.meta_factory.accepted)
    if typing.get_origin(field.x_type) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(field.x_type))
    if field.x_type is bool:
        return "True|False"
    return re.sub(r"[\w.]+[.:](?=\w)", "", type_repr(field.x_type))  # Without its modules.


def _name_of(field: Field, part: type) -> str:
    names = field.meta_factory.accepted if isinstance(field.meta_factory, Names) else {}
    targets = {target: name for name, target in names.items()}
    return targets.get(f"{part.__module__}:{part.__qualname__}", part.__name__)


def _text(value: object) -> str:
    """A value as a user would type it."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return ",".join(_text(item) for item in cast("Sequence[object]", value))
    return value.__qualname__ if isinstance(value, type | FunctionType) else repr(value)


def _hint(path: str, options: Mapping[str, object]) -> str:
    """The nearest option: the same name elsewhere in the tree, else the most similar spelling."""
    name = path.rpartition(".")[2]
    for option in options:
        if option.rpartition(".")[2] == name:
            return f"; did you mean {option!r}?"
    names = {option.rpartition(".")[2]: option for option in reversed(list(options))}
    by_name = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    by_path = difflib.get_close_matches(path, options, n=1, cutoff=0.6)
    nearest_option = by_path[0] if by_path else names[by_name[0]] if by_name else None
    return f"; did you mean {nearest_option!r}?" if nearest_option else ";"


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error


def _exit(sentence: str, code: int) -> NoReturn:
    print(sentence, file=sys.stderr)
    raise SystemExit(code)
