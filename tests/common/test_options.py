"""Fields as options; what is read of chz without being published by it."""

from importlib.metadata import version

import chz
import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.options import built, options_of
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.recipes.chat.train_cli import CLIConfig as Chat
from tests.families import sampled
from tests.optimizers import NEEDED


@chz.chz
class Part:
    size: int = chz.field(default=1, doc="how big")


@chz.chz
class Small(Part):
    pass


@chz.chz
class Config:
    needed: str = chz.field(doc="must be given")
    made: tuple[int, ...] = chz.field(default_factory=lambda: (1, 2))
    part: Part = chz.field(default=Part(size=3), doc="a part")
    other: Part | None = chz.field(default=None, doc="or none")


@chz.chz
class Special(Config):
    needed: str = "given"


def test_this_is_the_version_of_chz_that_is_read() -> None:
    assert version("chz").startswith("0.4"), "read options.py beside the new version's source"


def test_a_field_with_another_default_keeps_its_doc() -> None:
    assert options_of(Special)["needed"].doc == "must be given"


def test_options_are_those_of_parts_that_are_there() -> None:
    values = {path: option.value for path, option in options_of(Config).items()}
    assert values == {"needed": None, "made": "1,2", "part": "Part", "part.size": "3"} | {
        "other": "None"
    }
    given = chz.Blueprint[object](Config).apply({"other.size": chz.Castable("2"), "part": Part})
    values = {path: option.value for path, option in options_of(given).items()}
    assert (values["part"], values["part.size"]) == ("Part", "1")
    assert (values["other"], values["other.size"]) == ("Part", "2")


@pytest.mark.parametrize("recipe", sampled(RECIPES, 4))
def test_every_option_of_a_recipe_can_be_typed_as_shown(recipe: str) -> None:
    config_class = recipe_config(recipe)
    shown = {each.path: each.value for each in options_of(config_class).values() if each.value}
    assert len(shown) > 30
    config = config_class()
    assert built(config_class, shown) == config
    assert built(config, {}) == config == config_from_json(config_to_json(config))


@pytest.mark.parametrize("name", sampled(OPTIMIZER_NAMES, 4))
def test_every_option_of_an_optimizer_can_be_typed_as_shown(name: str) -> None:
    chosen = {"optimizer": name}
    blueprint = chz.Blueprint[object](Chat).apply({"optimizer": chz.Castable(name)})
    shown = {path: each.value or "" for path, each in options_of(blueprint).items()}
    space = {"search_space": NEEDED.get(name, "low_rank")}
    own = {path: text for path, text in shown.items() if path.startswith("optimizer")}
    assert built(Chat, own | space) == built(Chat, chosen | space)
