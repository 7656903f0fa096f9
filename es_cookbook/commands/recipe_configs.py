"""Recipes by name, for commands that work with any of them."""

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from es_cookbook import train
from es_cookbook.common.errors import ConfigError, did_you_mean, nearest
from es_cookbook.common.references import resolve

_RECIPES = "es_cookbook.recipes"


def recipe_names() -> list[str]:
    """All recipes, in alphabetical order."""
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
