"""What commands that train by gradients have in common: a recipe's settings, and a run's end."""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar, cast

import chz

from es_cookbook import train
from es_cookbook.baselines.gradient_config import GradientConfig
from es_cookbook.commands.recipe_configs import recipe_config
from es_cookbook.common.terminal import BEGAN
from es_cookbook.runs.tracking.result import Result, result_of
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from es_cookbook.train.program import path_for, run_and_tell
from es_cookbook.train.stopping.signals import run_until_signal

_Config = TypeVar("_Config", bound=GradientConfig)


def of_recipe(config_class: Callable[..., _Config], recipe: str) -> _Config:
    """As much as a recipe's own run, by gradients: all genomes' attempts are the group's.

    Raises:
        ConfigError: There is no such recipe.
    """
    like = cast("Callable[..., train.Config]", recipe_config(recipe))()
    return config_class(
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


def train_and_tell(main: Callable[[_Config], Awaitable[None]], config: _Config, name: str) -> None:
    """Train, and say in one line what it brought.

    `name` is in that of the directory, where `log_path` is empty.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    if not config.log_path:
        what = chz.replace(
            config, trackers=StandardTrackersBuilder(), hub=None, behavior_if_log_dir_exists="ask"
        )
        config = chz.replace(config, log_path=path_for(what, f"{name}-seed{config.seed}"))
    run_and_tell(functools.partial(run, main, config), Path(config.log_path), BEGAN)


def run(main: Callable[[_Config], Awaitable[None]], config: _Config) -> Result:
    """Train as a program: Ctrl-C and SIGTERM stop it cleanly.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    try:
        interrupted = run_until_signal(functools.partial(main, config))
    except KeyboardInterrupt:
        interrupted = True
    if interrupted:
        raise KeyboardInterrupt(
            "interrupted; to go on from the last checkpoint, run the same command with "
            f"log_path={config.log_path} behavior_if_log_dir_exists=resume"
        )
    return result_of(Path(config.log_path))
