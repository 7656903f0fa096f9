"""Recipes by name, and options of their runs, for commands that work with any of them."""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

from es_cookbook import train
from es_cookbook.common.errors import ConfigError, did_you_mean, nearest
from es_cookbook.common.references import resolve

_RECIPES = "es_cookbook.recipes"


def recipe_names() -> list[str]:
    package = importlib.import_module(_RECIPES)
    return sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg)


def recipe_config(recipe: str) -> type[train.Config]:
    """The config of the recipe's command.

    Raises:
        ConfigError: There is no such recipe.
    """
    names = recipe_names()
    if recipe not in names:
        raise ConfigError(f"unknown recipe {recipe!r}: {nearest(recipe, names)}")
    return cast("type[train.Config]", resolve(f"{_RECIPES}.{recipe}.train_cli:CLIConfig"))


def recipe_defaults(recipe: str) -> train.Config:
    """The run that the recipe's command makes without options.

    Raises:
        ConfigError: There is no such recipe.
    """
    return cast("Callable[[], train.Config]", recipe_config(recipe))()


def check_options(
    paths: Iterable[str],
    known: Collection[str],
    refused: Mapping[str, str],
    *,
    whose: str,
    prefix: str = "",
) -> None:
    """Refuse options of a recipe's runs that are none, or that a command of many runs sets itself.

    Args:
        paths: the options, by dotted path.
        known: what may stand before the first dot.
        refused: options that the command sets -> why, in words.
        whose: the command, as in "the sweep's".
        prefix: what the user typed before each path.

    Raises:
        ConfigError: The first such option.
    """
    for path in paths:
        if path in refused:
            raise ConfigError(f"{prefix}{path} cannot be given: {refused[path]}")
        if (first := path.partition(".")[0]) not in known:
            raise ConfigError(
                f"unknown option {prefix + path!r}: --help lists {whose} options, and train_cli's "
                f"--help those of its runs{did_you_mean(first, known)}"
            )


def by_label(
    fields: Mapping[str, str], labels: Collection[str], names: Collection[str], what: str
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Options of every run, and by label those of one's own: `label.field`.

    `names` are all that may be compared, and `what` is one of them in a word.

    Raises:
        ConfigError: An option of one that is not compared.
    """
    of_all: dict[str, str] = {}
    of_one: dict[str, dict[str, str]] = {label: {} for label in labels}
    for path, value in fields.items():
        first, _, rest = path.partition(".")
        if first in of_one and rest:
            of_one[first][rest] = value
        elif first in names:
            raise ConfigError(
                f"{path} is an option of {what} that is not compared; they are {', '.join(labels)}"
            )
        else:
            of_all[path] = value
    return of_all, of_one


def check_comparison(metric: str, lists: Mapping[str, Sequence[object]]) -> None:
    """Refuse lists that are empty or name something twice, and metrics that are not held out.

    Raises:
        ConfigError: Names the option.
    """
    for field, values in lists.items():
        if not values:
            raise ConfigError(f"{field} must name at least one, found none")
        if len(set(values)) < len(values):
            raise ConfigError(f"{field} must be different ones, found {tuple(values)}")
    if not metric.startswith("test/"):
        raise ConfigError(f"metric must be a held-out one, test/..., found {metric!r}")
