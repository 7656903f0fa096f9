"""A recipe's settings hold whichever optimizer is chosen, as far as it has them."""

from collections.abc import Mapping
from typing import cast

import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config, recipe_defaults
from es_cookbook.common.cli import run_cli
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.schedules import Constant, Cosine
from es_cookbook.recipes.countdown.train_cli import CLIConfig as Countdown
from tests.optimizers import NEEDED


def space(name: str) -> list[str]:
    return [f"search_space={NEEDED[name]}"] if name in NEEDED else []


def chosen(config_class: type, *options: str) -> OptimizerBuilder:
    made: list[object] = []
    run_cli(made.append, config_class, options)
    return cast(OptimizerBuilder, getattr(made[0], "optimizer"))  # noqa: B009


DIFFERENT = {str(recipe_defaults(name).optimizer): name for name in RECIPES}
"""Settings -> one of the recipes that have them."""


@pytest.mark.parametrize("recipe", DIFFERENT.values())
def test_every_optimizer_has_the_recipes_population(recipe: str) -> None:
    config_class = recipe_config(recipe)
    es = chosen(config_class, "optimizer=es")
    assert isinstance(es, ES) and es == chosen(config_class)
    assert es.population_size >= (16 if recipe == "merge" else 64)  # That searches two numbers.
    assert all(each == "auto" or each >= 0.005 for each in (es.sigma, es.learning_rate))
    for name in OPTIMIZER_NAMES:
        optimizer = chosen(config_class, f"optimizer={name}", *space(name))
        assert optimizer.population_size == es.population_size


COUNTDOWN: Mapping[str, Mapping[str, object]] = {
    "es": {"learning_rate": 0.02},
    "momentum": {"learning_rate": 0.02},
    "muon": {"learning_rate": 0.02},
    "adam": {"learning_rate": 0.0025},
    "rmsprop": {"learning_rate": 0.0025},
    "clip_up": {"learning_rate": 0.0004, "max_speed": 0.001},
    "genetic": {"sigma": 0.004, "sigma_schedule": Cosine(), "max_terms": 16},
    "cma": {"sigma": 0.05},
    "sep_cma": {"sigma": 0.01},
}


@pytest.mark.parametrize("name", COUNTDOWN)
def test_countdowns_own_settings_of_one_optimizer_win(name: str) -> None:
    optimizer = chosen(Countdown, f"optimizer={name}", *space(name))
    assert optimizer.population_size == 64
    assert {field: getattr(optimizer, field) for field in COUNTDOWN[name]} == COUNTDOWN[name]
    assert getattr(optimizer, "sigma_schedule", Constant()) in (Constant(), Cosine())
