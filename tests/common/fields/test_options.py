"""Options of configs: all that is shown can be typed."""

import chz
import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config
from es_cookbook.common.cli import built, changed
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.fields.options import options_of
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.recipes.chat.train_cli import CLIConfig as Chat


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_that_a_recipe_shows_can_be_typed(recipe: str) -> None:
    config_class = recipe_config(recipe)
    shown = {each.path: each.value for each in options_of(config_class).values() if each.value}
    assert len(shown) > 30
    config = config_class()
    assert built(config_class, shown) == config
    assert changed(config, {}) == config == config_from_json(config_to_json(config))


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_all_that_an_optimizer_shows_can_be_typed(name: str) -> None:
    chosen = {"optimizer": name}
    blueprint = chz.Blueprint(Chat).apply({"optimizer": chz.Castable(name)})
    shown = {path: each.value or "" for path, each in options_of(blueprint).items()}
    spaces = {"qes": "quant_codes", "cma": "full_rank", "sep_cma": "full_rank"}
    space = {"search_space": spaces.get(name, "low_rank")}
    own = {path: text for path, text in shown.items() if path.startswith("optimizer")}
    assert built(Chat, own | space) == built(Chat, chosen | space)
