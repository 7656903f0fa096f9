"""Options from a YAML file, as they would be typed: `config=run.yaml learning_rate=1e-4`.

    recipe: arithmetic
    learning_rate: 3e-4
    engine: torch
    engine.num_lanes: 2
    dataset:
      num_train: 1000

is `recipe=arithmetic learning_rate=3e-4 engine=torch engine.num_lanes=2 dataset.num_train=1000`.
Options behind the file change what it says. A list is its items with commas.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import chz
import yaml

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import LARGEST_CONFIG, read_file

_NAME = "config="


@chz.chz
class OptionsFile:
    """A YAML file of options."""

    config: str = chz.field(doc="YAML file: options as they would be typed, nested or with dots")


def expanded(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command, with the options of `config=FILE` before all others.

    Raises:
        SystemExit: The file cannot be read as options; says why.
    """
    found: list[str] = []

    def read(option: OptionsFile) -> None:
        found.extend(options_in(Path(option.config)))

    for named in (each for each in arguments if each.startswith(_NAME)):
        run_cli(read, OptionsFile, [named])
    return [*found, *(each for each in arguments if not each.startswith(_NAME))]


def options_in(path: Path) -> list[str]:
    """The options of a file, name=value each.

    Raises:
        ConfigError: There is no such file, it is no YAML, or it holds something else than options.
    """
    try:
        plain: object = yaml.safe_load(read_file(path, LARGEST_CONFIG, None).decode("utf-8"))
        options = dict(_flat(path, plain, ""))
    except OSError as error:
        raise ConfigError(f"config={path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"config={path} is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config={path} cannot be read as YAML: {reason}") from error
    return [f"{name}={value}" for name, value in options.items()]


def _flat(path: Path, plain: object, name: str) -> Iterator[tuple[str, str]]:
    """Every option inside, with its whole name."""
    if isinstance(plain, dict):
        for key, value in cast("Mapping[object, object]", plain).items():
            if not isinstance(key, str) or not key:
                raise ConfigError(f"config={path}: options have names, found {key!r}")
            yield from _flat(path, value, f"{name}.{key}" if name else key)
    elif not name:
        raise ConfigError(
            f"config={path} must hold options, `name: value` in each line, found "
            f"{'nothing' if plain is None else type(plain).__name__}"
        )
    elif isinstance(plain, list):
        items = cast("list[object]", plain)
        yield name, ",".join(_text(path, name, item) for item in items)
    else:
        yield name, _text(path, name, plain)


def _text(path: Path, name: str, value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    raise ConfigError(
        f"config={path}: {name} must be text, a number, true, false or null, or a list of them, "
        f"found {type(value).__name__}"
    )
