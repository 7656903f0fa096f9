"""A recipe's settings hold whichever optimizer is chosen, or a line says which do not."""

import functools
from collections.abc import Mapping
from typing import cast

import chz
import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config, recipe_defaults
from es_cookbook.common.cli import run_cli, split_options
from es_cookbook.common.schedules import Constant, Cosine
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.plugins.report.commands.compare import Compare
from es_cookbook.plugins.report.commands.compare import runs as compared_runs
from es_cookbook.plugins.sweep.command import Sweep, maker
from es_cookbook.recipes.arithmetic.train_cli import CLIConfig as Arithmetic
from es_cookbook.recipes.countdown.train_cli import CLIConfig as Countdown

SPACES = {
    "cma": ["search_space=adapter"],
    "sep_cma": ["search_space=adapter"],
    "qes": ["search_space=quant_codes"],
}
FIELDS = ("population_size", "sigma", "learning_rate", "antithetic", "learning_rate_schedule")


@chz.chz
class MyAdam(Adam):
    """A user's own, of which nobody knows the name."""


def chosen(config_class: type, *options: str) -> OptimizerBuilder:
    made: list[object] = []
    run_cli(made.append, config_class, options)
    return cast(OptimizerBuilder, getattr(made[0], "optimizer"))  # noqa: B009


DIFFERENT = {str(recipe_defaults(name).optimizer): name for name in RECIPES}
"""Settings -> one of the recipes that have them."""


@pytest.mark.parametrize("recipe", DIFFERENT.values())
def test_every_optimizer_has_the_recipes_settings_or_a_line_says_which_not(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config_class = recipe_config(recipe)
    es = chosen(config_class, "optimizer=es")
    assert isinstance(es, ES) and capsys.readouterr().err == ""
    assert es == chosen(config_class)
    assert es.population_size >= 64
    assert all(each == "auto" or each >= 0.005 for each in (es.sigma, es.learning_rate))
    for name in OPTIMIZER_NAMES:
        optimizer = chosen(config_class, f"optimizer={name}", *SPACES.get(name, []))
        said = capsys.readouterr().err
        assert optimizer.population_size == es.population_size
        for field in FIELDS:
            of_recipe = getattr(es, field)
            if getattr(optimizer, field, None) != of_recipe != getattr(ES(), field):
                assert said.startswith(f"optimizer={name}: ") and field in said


def test_momentum_takes_all_and_what_normalises_its_step_has_one_as_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    momentum = chosen(Arithmetic, "optimizer=momentum")
    assert capsys.readouterr().err == ""
    own = {name: getattr(momentum, name) for name in FIELDS}
    assert own == dict(zip(FIELDS, (256, 0.01, 0.04, False, Cosine()), strict=True))
    adam = chosen(Arithmetic, "optimizer=adam")
    # 0.04 / √256: the RMS of es's step.
    assert (adam.population_size, getattr(adam, "learning_rate")) == (256, 0.0025)  # noqa: B009
    assert capsys.readouterr().err == (
        "optimizer=adam: learning_rate is 0.0025 in place of es's 0.04\n"
    )


def test_a_setting_that_is_given_is_not_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    adam = chosen(Arithmetic, "optimizer=adam", "optimizer.learning_rate=0.001")
    assert getattr(adam, "learning_rate") == 0.001  # noqa: B009
    assert capsys.readouterr().err == ""


def test_a_schedule_of_what_an_optimizer_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        chosen(Countdown, "optimizer=cma", "optimizer.learning_rate_schedule=cosine")
    assert capsys.readouterr().err == (
        "unknown option 'optimizer.learning_rate_schedule', which optimizer=cma does not have (it "
        "has sigma_schedule); did you mean optimizer=es optimizer.learning_rate_schedule=cosine? "
        "--help lists all\n"
    )


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
    optimizer = chosen(Countdown, f"optimizer={name}", *SPACES.get(name, []))
    assert optimizer.population_size == 64
    assert {field: getattr(optimizer, field) for field in COUNTDOWN[name]} == COUNTDOWN[name]
    assert getattr(optimizer, "sigma_schedule", Constant()) in (Constant(), Cosine())


@pytest.mark.parametrize(
    "typed",
    [
        "Adam",
        "es_cookbook.evolution.optimizers.adam:Adam",
        "MyAdam",
        f"{__name__}:MyAdam",
    ],
)
def test_a_class_that_is_chosen_otherwise_than_by_its_name_takes_them_too(typed: str) -> None:
    adam = chosen(Arithmetic, f"optimizer={typed}")
    assert isinstance(adam, Adam)
    assert (adam.population_size, adam.sigma, adam.learning_rate) == (256, 0.01, 0.0025)


def test_compare_and_sweep_say_once_what_an_optimizer_has_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "optimizer=adam: learning_rate is 0.0025 in place of es's 0.04\n"

    def compare(config: Compare, fields: Mapping[str, str]) -> None:
        (adam,) = compared_runs(config, fields)["adam"]
        assert isinstance(adam.optimizer, Adam) and adam.optimizer.learning_rate == 0.0025

    own, fields = split_options(Compare, ["recipe=arithmetic", "optimizers=es,adam", "seeds=0"])
    run_cli(functools.partial(compare, fields=fields), Compare, own)
    assert capsys.readouterr().err == said

    def sweep(config: Sweep, fields: Mapping[str, str]) -> None:
        make, _ = maker(config, fields)
        for seed in (0, 1):
            optimizer = make({"seed": seed}).optimizer
            assert isinstance(optimizer, Adam) and optimizer.population_size == 256

    own, fields = split_options(Sweep, ["recipe=arithmetic", "optimizer=adam"])
    run_cli(functools.partial(sweep, fields=fields), Sweep, own)
    assert capsys.readouterr().err == said
