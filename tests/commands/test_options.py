"""Recipes by name, as commands know them."""

from es_cookbook.__main__ import RECIPES
from es_cookbook.commands.options import recipe_config, recipe_names


def test_the_names_are_those_of_the_recipes_that_can_be_run() -> None:
    assert recipe_names() == sorted(RECIPES)
    assert all(recipe_config(name).__name__ == "CLIConfig" for name in RECIPES)
