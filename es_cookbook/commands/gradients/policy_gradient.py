"""Train by a policy gradient where evolution strategies would: the same problems, Envs and model.

    python -m es_cookbook policy_gradient recipe=arithmetic
    ... recipe=countdown method=ppo attempts=64 num_generations=50
    ... model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl prompt="{question}"
        reward=my_rewards:score learning_rate=1e-6
    ... config=run.yaml seed=1

A recipe gives its model, problems, lengths, and as many rollouts as its own run has: every genome's
attempts at a problem become the group's. `data`, `prompt` and the like are those of `train`. What
the methods are, and what is left out, is in `es_cookbook.baselines.policy_gradient`.

The run directory has the files of other runs but the history. `evaluate log_path=...` measures it,
against runs of evolution strategies too.
"""

import functools
import sys

import chz

from es_cookbook.baselines import policy_gradient
from es_cookbook.commands.gradients import as_program
from es_cookbook.commands.gradients.options_file import expanded
from es_cookbook.commands.gradients.recipe_option import RECIPE_HELP, recipe_in
from es_cookbook.commands.train import DATASETS, whole_names
from es_cookbook.common.cli import run_cli
from es_cookbook.rl.types import RLDatasetBuilder


@chz.chz
class PolicyGradientConfig(policy_gradient.Config):
    """Train by a policy gradient on a recipe's problems (recipe=NAME) or rows of data."""

    dataset: RLDatasetBuilder = chz.field(meta_factory=DATASETS, doc="problems, and held-out ones")
    log_path: str = chz.field(
        default="", doc="run directory; runs/<name>-<digest of the options> if empty"
    )


def of_recipe(recipe: str) -> PolicyGradientConfig:
    """As much as a recipe's own run, by gradients.

    Raises:
        ConfigError: There is no such recipe.
    """
    return as_program.of_recipe(PolicyGradientConfig, recipe)


def main(config: PolicyGradientConfig, name: str = "") -> None:
    """Train, and say in one line what it brought.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    name = f"policy_gradient-{name or config.dataset.label}"
    as_program.train_and_tell(policy_gradient.main, config, name)


def cli() -> None:
    """The console entry point."""
    recipe, options = recipe_in(expanded(sys.argv[1:]))
    run_cli(
        functools.partial(main, name=recipe),
        of_recipe(recipe) if recipe else PolicyGradientConfig,
        whole_names(options),
        RECIPE_HELP,
    )
