"""Recipes by name, for commands that work with any of them."""

import importlib
import pkgutil
from typing import cast

from es_cookbook import train
from es_cookbook.common.errors import ConfigError, nearest
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
