"""Train with a policy gradient, on the same problems, Envs and model as evolution strategies.

    python -m es_cookbook policy_gradient recipe=arithmetic
    ... recipe=countdown method=ppo attempts=64 num_generations=50
    ... model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl prompt="{question}"
        reward=my_rewards:score learning_rate=1e-6
    ... config=run.yaml seed=1

A recipe sets its model, problems, lengths, and as many rollouts as its own run has: the attempts of
all genomes at a problem become the group. `data`, `prompt` and similar options are those of
`train`. `es_cookbook.plugins.gradients.policy_gradient` describes the methods.

The run directory has the files of other runs except the history. `evaluate log_path=...` measures
it, also against runs of evolution strategies.
"""

import functools
import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import chz

from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.cli import arguments, mistakes_exit, run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.plugins.gradients.gradient_config import GradientConfig
from es_cookbook.runs.program import run_and_tell
from es_cookbook.runs.signals import result_until_signal
from es_cookbook.runs.tracking.jsonl import Result, result_of

_Config = TypeVar("_Config", bound=GradientConfig)
_HELP = "\n\nrecipe=NAME takes model, problems, lengths and rollouts of a recipe."


def train_cli(
    train: Callable[[_Config], Awaitable[None]], config_class: type[_Config], command: str
) -> None:
    """Run a command that trains, with the options of the command line.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    with mistakes_exit():
        recipe, options = recipe_in(arguments())
        config = of_recipe(config_class, recipe) if recipe else config_class

    def main(config: _Config) -> None:
        name = f"{command}-{recipe or config.dataset.label}"
        run_and_tell(functools.partial(run, train), config, name, BEGAN)

    run_cli(main, config, options, _HELP)


def recipe_in(options: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the recipe, "" if none, and all other options.

    >>> recipe_in(["seed=1", "recipe=countdown"])
    ('countdown', ['seed=1'])
    """
    named = [each for each in options if each.startswith("recipe=")]
    recipe = named[-1].removeprefix("recipe=") if named else ""
    return recipe, [each for each in options if each not in named]


def of_recipe(config_class: Callable[..., _Config], recipe: str) -> _Config:
    """Return a recipe's run by gradients: the attempts of all genomes become the group.

    Raises:
        ConfigError: The recipe does not exist.
    """
    like = recipe_defaults(recipe)
    same = ("model_name", "dataset", "engine", "num_generations", "seed")
    same += ("eval_every", "eval_attempts", "eval_temperature")
    same += ("rollout_timeout", "turn_timeout", "max_failed_fraction")
    return config_class(
        **{name: getattr(like, name) for name in same},
        sampling=chz.replace(like.sampling, temperature=1.0, top_p=1.0),
        attempts=max(like.optimizer.population_size * like.attempts, 2),
    )


def run(train: Callable[[_Config], Awaitable[None]], config: _Config) -> Result:
    """Train as a program: Ctrl-C and SIGTERM stop it cleanly.

    Raises:
        KeyboardInterrupt: It was stopped; says how to continue.
    """
    result_until_signal(
        functools.partial(train, config),
        "interrupted; to go on from the last checkpoint, run the same command with "
        f"log_path={shlex.quote(config.log_path)} behavior_if_log_dir_exists=resume",
    )
    return result_of(Path(config.log_path))


def cli() -> None:
    train_cli(policy_gradient.main, policy_gradient.Config, "policy_gradient")
