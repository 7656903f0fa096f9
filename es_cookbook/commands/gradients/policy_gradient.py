"""Train by a policy gradient where evolution strategies would: the same problems, Envs and model.

    python -m es_cookbook policy_gradient recipe=arithmetic
    ... recipe=countdown method=ppo attempts=64 num_generations=50
    ... model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl prompt="{question}"
        reward=my_rewards:score learning_rate=1e-6

A recipe gives its model, problems, lengths, and as many rollouts as its own run has: every genome's
attempts at a problem become the group's. `data`, `prompt` and the like are those of `train`. What
the methods are, and what is left out, is in `es_cookbook.baselines.policy_gradient`.

The run directory has the files of other runs but the history. `evaluate log_path=...` measures it,
against runs of evolution strategies too.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import chz

from es_cookbook import train
from es_cookbook.baselines import policy_gradient
from es_cookbook.commands.gradients.recipe_option import RECIPE_HELP, recipe_in
from es_cookbook.commands.recipe_configs import recipe_config
from es_cookbook.commands.train import DATASETS, whole_names
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.rl.types import RLDatasetBuilder
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from es_cookbook.train.program import path_for, run_and_tell
from es_cookbook.train.signals import run_until_signal


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
    like = cast("Callable[..., train.Config]", recipe_config(recipe))()
    return PolicyGradientConfig(
        model_name=like.model_name,
        dataset=like.dataset,
        engine=like.engine,
        sampling=chz.replace(like.sampling, temperature=1.0, top_p=1.0),
        attempts=max(like.optimizer.population_size * like.attempts, 2),
        num_generations=like.num_generations,
        eval_every=like.eval_every,
        eval_attempts=like.eval_attempts,
        eval_temperature=like.eval_temperature,
        seed=like.seed,
        rollout_timeout=like.rollout_timeout,
        turn_timeout=like.turn_timeout,
        max_failed_fraction=like.max_failed_fraction,
    )


def main(config: PolicyGradientConfig, name: str = "") -> None:
    """Train, and say in one line what it brought.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    if not config.log_path:
        what = chz.replace(
            config, trackers=StandardTrackersBuilder(), behavior_if_log_dir_exists="ask"
        )
        name = f"policy_gradient-{name or config.dataset.label}-seed{config.seed}"
        config = chz.replace(config, log_path=path_for(what, name))
    run_and_tell(functools.partial(run, config), Path(config.log_path), BEGAN)


def run(config: policy_gradient.Config) -> None:
    """Train as a program: Ctrl-C and SIGTERM stop it cleanly.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    try:
        interrupted = run_until_signal(functools.partial(policy_gradient.main, config))
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        raise KeyboardInterrupt(
            "interrupted; to go on from the last checkpoint, run the same command with "
            f"log_path={config.log_path} behavior_if_log_dir_exists=resume"
        )


def cli() -> None:
    """The console entry point."""
    recipe, options = recipe_in(sys.argv[1:])
    run_cli(
        functools.partial(main, name=recipe),
        of_recipe(recipe) if recipe else PolicyGradientConfig,
        whole_names(options),
        RECIPE_HELP,
    )
