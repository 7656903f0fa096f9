"""Options: the fields of a config and of its parts, as dotted paths with values as text.

`options_of` lists the options of a config class, or of a blueprint in which parts are chosen;
`built` gives a config's class the values that a user typed. chz builds the config; this module adds
messages that name the option and the nearest valid one. If a field is a tuple of parts, an item's
number is in the path: `parts.0.weight`. Options may be in a YAML file too, with dots or nested:

    recipe: arithmetic
    learning_rate: 3e-4
    engine.num_lanes: 2
    dataset:
      num_train: 1000

A list is its items with commas or, for parts, with their numbers in the paths. Values are taken as
they are written (`1e-3`, `007`, `None`).

A config class may have `whole_options`, a class method that expands short names and presets.

Some of this uses what chz 0.4 does not publish; pyproject.toml bounds chz for it.

Left out: options for fields that hold a function, unless a name stands for it.
"""

import functools
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType
from typing import NamedTuple, TypeVar, cast

import chz
import chz.factories
from chz.blueprint._blueprint import SpecialArg
from chz.blueprint._entrypoint import EntrypointException
from chz.util import MISSING

from es_cookbook.common.checks import may_be_called, type_name
from es_cookbook.common.errors import ConfigError, ESCookbookError, did_you_mean, nearest
from es_cookbook.common.files import LARGEST_CONFIG, read_file

# pyright: reportPrivateUsage=false

_Config = TypeVar("_Config")
_ARGUMENT = re.compile(r" \(when evaluating argument '(\w+)' for .*\)", re.DOTALL)
"""A note that chz adds to an error for each part that it was building, the innermost first."""
_UNFIT = re.compile(
    r"Could not interpret argument .* provided for param '(\S+?)'\.\.\..*?"
    r"(?:( is a name)\n.*)?polymorphic construction:\n(.*)",
    re.DOTALL,
)


class OptionError(ESCookbookError):
    """An option that does not exist, or has a value that its field cannot have."""


class Option(NamedTuple):
    """One option of a config.

    Attributes:
        path: its name, with dots.
        doc: its line of documentation.
        value: its current value, as a user would type it; None if it must be given.
        accepts: accepted values, shown in brackets on the help page.
        is_optional: whether it is a part that is None until it, or a field of it, is given.
    """

    path: str
    doc: str
    value: str | None
    accepts: str
    is_optional: bool


def options_of(config: "type | chz.Blueprint[object]") -> dict[str, Option]:
    """Return the options of a config class or of a blueprint, with those of its parts, by path.

    Raises:
        InvalidBlueprintArg: A field cannot have a value that was applied to the blueprint.
    """
    blueprint = chz.Blueprint[object](config) if isinstance(config, type) else config
    made = blueprint._make_lazy()
    found: dict[str, Option] = {}
    parts: dict[str, object] = {"": blueprint.target}
    for path, param in made.all_params.items():
        parent = path.rpartition(".")[0]
        if not path or parent not in parts:  # The whole, or of a part that is left out.
            continue
        whole, given, factory = parts[parent], blueprint._arg_map.get_kv(path), param.meta_factory
        if path in made.meta_factory_value:
            spec = parts[path] = made.meta_factory_value[path]
        elif given is not None:
            spec = given.value
        elif chz.is_chz(whole) and not isinstance(whole, type):  # chz does not look into defaults.
            spec = getattr(whole, param.name, MISSING)
        else:
            spec = param.default.instantiate() if param.default else MISSING
        if chz.is_chz(spec):
            parts[path] = spec
        is_plain = type(factory) in (NoneType, chz.factories.standard)
        if not param.name.isdecimal() and not (is_plain and may_be_called(param.type)):
            names = cast("Mapping[str, str]", getattr(factory, "accepted", {}))
            found[path] = Option(
                path=path,
                doc=_doc_of(_class_of(whole), param.name),
                value=_typed(spec, names),
                accepts=_accepts(param.type, names),
                is_optional=getattr(factory, "is_optional", False),
            )
    return found


def _class_of(spec: object) -> type | None:
    """Return the chz class of an object, or the one that a class or a partial builds."""
    built_by = spec.func if isinstance(spec, functools.partial) else spec
    found = built_by if isinstance(built_by, type) else type(built_by)
    return found if chz.is_chz(found) else None


def _doc_of(config_class: type | None, name: str) -> str:
    """Return a field's doc; from the base class if a subclass only changes the default."""
    bases = config_class.__mro__ if config_class else ()
    fields = (vars(each).get("__chz_fields__", {}).get(name) for each in bases)
    return next((field._doc for field in fields if field and field._doc), "")


def _accepts(declared: object, names: Collection[str]) -> str:
    is_literal = typing.get_origin(declared) is typing.Literal
    words = [*names] or [str(value) for value in typing.get_args(declared) if is_literal]
    return "|".join(words) or ("True|False" if declared is bool else type_name(declared))


def _typed(spec: object, names: Mapping[str, str]) -> str | None:
    if (part := _class_of(spec)) is not None:
        by_target = {target: name for name, target in names.items()}
        return by_target.get(f"{part.__module__}:{part.__qualname__}", part.__name__)
    if isinstance(spec, SpecialArg):
        return str(getattr(spec, "value", spec))
    return None if spec is MISSING else as_typed(spec)


def as_typed(value: object) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return ",".join(as_typed(item) for item in cast("Sequence[object]", value))
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)


def built(config: type[_Config] | _Config, given: Mapping[str, str]) -> _Config:
    """Build a config from options as typed; only inside `run_cli`.

    Options that are not given have the defaults of the class, or the values of `config`. A part of
    it keeps its class unless the class changes; a new class has its own defaults.

    Raises:
        OptionError: An option is unknown, is missing, or has a value that its field cannot have.
        ConfigError: A class refuses the values of its fields.
    """
    given = whole_options(config, given)
    blueprint, options = blueprint_of(config, given)
    for path in given:
        if path not in options:
            meant = did_you_mean(path, options)
            raise OptionError(f"unknown option {path!r}{meant or ';'} --help all lists all")
    if missing := [f"{path}=..." for path, option in options.items() if option.value is None]:
        raise OptionError(f"missing {', '.join(missing)}; --help lists all options")
    try:
        return cast(_Config, blueprint.make())
    except (EntrypointException, ESCookbookError, ValueError, TypeError) as error:
        kind = type(error) if isinstance(error, ESCookbookError) else ConfigError
        raise kind(_located(error, options)) from error  # From a config's own validators.


def whole_options(config: object, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options with short names and presets expanded, if the config has any."""
    return getattr(config, "whole_options", dict)(given)


def blueprint_of(
    config: object, given: Mapping[str, str]
) -> "tuple[chz.Blueprint[object], Mapping[str, Option]]":
    """Return the blueprint from which chz builds a config, and its options.

    Raises:
        OptionError: A field cannot have the value that is given.
    """
    blueprint = chz.Blueprint[object](config if isinstance(config, type) else type(config))
    if not isinstance(config, type):
        values: dict[str, object] = chz.beta_to_blueprint_values(config)
        blueprint.apply({path: v for path, v in values.items() if _stays(path, v, given)})
    blueprint.apply({path: chz.Castable(text) for path, text in given.items()})
    try:
        options = options_of(blueprint)
    except ESCookbookError:  # From a field's own parser.
        raise
    except ValueError as error:  # From chz, which parses the number of an item.
        raise OptionError(f"items of a list are numbered, as in parts.0: {error}") from error
    except EntrypointException as error:
        found = _UNFIT.match(str(error))
        if found is None or (path := found[1]) not in given:
            raise OptionError(" ".join(str(error).split())) from error
        options = blueprint_of(config, {n: text for n, text in given.items() if n != path})[1]
        cast_to = str(error).partition("' to ")[2].partition("\n")[0]
        # Nothing else turns on the optional part that it is in.
        accepted = options[path].accepts if path in options else cast_to
        fields = [option for option in options if option.startswith(f"{path}.")]
        if found[2]:  # It is chosen by a name.
            said = found[3]
        elif "|" in accepted and " " not in accepted:
            said = nearest(given[path], accepted.split("|"))
        elif fields:
            said = f"it has no choices; set its fields, as in {fields[0]}=..."
        else:
            said = f"it must be {accepted}"
        raise OptionError(f"{path}={given[path]}: {' '.join(said.split())}") from error
    chosen = {
        path: "True"
        for path, option in options.items()
        if option.is_optional and option.value == "None"
        if any(other.startswith(f"{path}.") for other in given)
    }
    if chosen.keys() - given.keys():  # An optional part with a given field.
        return blueprint_of(config, {**chosen, **given})
    return blueprint, options


def _stays(path: str, value: object, given: Mapping[str, str]) -> bool:
    """Return whether a value of a config is kept when these options are given."""
    is_replaced = any(f"{path}.".startswith(f"{other}.") for other in given)
    is_inside = any(other.startswith(f"{path}.") for other in given)
    return not is_replaced and (isinstance(value, type) or not is_inside)


def _located(error: Exception, options: Collection[str]) -> str:
    """Return the message of a part's class, with the part's path before the field's name.

    A class does not know its path in the config. Its messages begin with the name of a field, alone
    or after the usual name of its part.
    """
    sentence = " ".join(str(error).split())
    notes = map(_ARGUMENT.fullmatch, getattr(error, "__notes__", ()))
    part = ".".join(reversed([note[1] for note in notes if note]))
    bare = re.sub(r"^(\w+\.)*", "", sentence)
    field = re.split(r"\W", bare, maxsplit=1)[0]
    if part and f"{part}.{field}" in options:
        return f"{part}.{bare}"
    return f"{part}: {sentence}" if part and part not in sentence else sentence


def options_in(path: Path) -> dict[str, str]:
    """Return the options in a YAML file, by path.

    Raises:
        ConfigError: It cannot be read, or holds something other than options.
    """
    import yaml

    try:
        text = read_file(path, LARGEST_CONFIG, None).decode("utf-8")
        # The base loader leaves every value as it is written, and makes nothing but text.
        return dict(_flat("", yaml.BaseLoader(text).get_single_data()))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"config={path} cannot be read: {said}") from error


def _flat(name: str, plain: object) -> Iterator[tuple[str, str]]:
    if isinstance(plain, list) and plain and not isinstance(plain[0], str):
        plain = dict(enumerate(cast("list[object]", plain)))
    if isinstance(plain, dict):
        for key, value in cast("dict[object, object]", plain).items():
            yield from _flat(f"{name}.{key}" if name else str(key), value)
    elif not name or (isinstance(plain, list) and not all(isinstance(i, str) for i in plain)):
        raise ConfigError(f"{name or 'it'} must hold options, each as NAME: VALUE in a line")
    else:
        yield name, as_typed(plain)
