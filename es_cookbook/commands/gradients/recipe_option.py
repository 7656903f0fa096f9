"""`recipe=NAME` of a command whose other options begin with what that recipe has."""

from collections.abc import Sequence

import chz

from es_cookbook.commands.recipe_configs import recipe_config
from es_cookbook.common.cli import run_cli

RECIPE_HELP = (
    "\n\nrecipe=NAME takes model, problems, lengths and rollouts of a recipe. config=FILE takes "
    "options from a\nYAML file; those behind it change them."
)


@chz.chz
class RecipeOption:
    """The recipe whose settings are meant."""

    recipe: str = chz.field(doc="a recipe, whose settings hold where no option changes them")


def recipe_in(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe that is named, "" if none, and all other options.

    >>> recipe_in(["seed=1", "recipe=countdown"])
    ('countdown', ['seed=1'])

    Raises:
        SystemExit: There is no such recipe.
    """
    named = [each for each in arguments if each.startswith("recipe=")][-1:]
    if named:
        run_cli(_check, RecipeOption, named)
    return "".join(named).removeprefix("recipe="), [a for a in arguments if a[:7] != "recipe="]


def _check(option: RecipeOption) -> None:
    recipe_config(option.recipe)
