"""Train by GRPO, TRL's, where evolution strategies would: the same problems, Envs and model.

    python -m es_cookbook grpo recipe=arithmetic
    ... recipe=countdown loss_type=dr_grpo scale_rewards=none attempts=64 num_generations=50
    ... recipe=countdown trl.entropy_coef=0.001
    ... config=run.yaml seed=1

`pip install 'es-cookbook[baselines]'`. A recipe gives its model, problems, lengths, and as many
rollouts as its own run has: every genome's attempts at a problem become the group's. `data`,
`prompt` and the like are those of `train`. `trl.NAME=VALUE` is any other argument of TRL's
GRPOConfig.

The run directory is that of `policy_gradient`, with `losses.csv`. `evaluate log_path=...` reads it.
"""

import functools
import sys
from collections.abc import Sequence

import chz

from es_cookbook.baselines.grpo import run
from es_cookbook.baselines.grpo.config import Config
from es_cookbook.commands.gradients import as_program
from es_cookbook.commands.gradients.options_file import expanded
from es_cookbook.commands.gradients.recipe_option import RECIPE_HELP, recipe_in
from es_cookbook.commands.train import DATASETS, whole_names
from es_cookbook.common.cli import run_cli
from es_cookbook.rl.types import RLDatasetBuilder

_TRL = "trl."


@chz.chz
class GRPOCommand(Config):
    """Train by GRPO on a recipe's problems (recipe=NAME) or rows of data."""

    dataset: RLDatasetBuilder = chz.field(meta_factory=DATASETS, doc="problems, and held-out ones")
    log_path: str = chz.field(
        default="", doc="run directory; runs/<name>-<digest of the options> if empty"
    )


def of_recipe(recipe: str) -> GRPOCommand:
    """As much as a recipe's own run, by GRPO.

    Raises:
        ConfigError: There is no such recipe.
    """
    return as_program.of_recipe(GRPOCommand, recipe)


def for_trl(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """NAME=VALUE of each `trl.NAME=VALUE`, the last of a name, and all other arguments.

    >>> for_trl(["seed=1", "trl.delta=2", "trl.delta=3"])
    (('delta=3',), ['seed=1'])
    """
    given = [text for text in arguments if text.lstrip("-").startswith(_TRL)]
    last = {text.partition("=")[0]: text.lstrip("-").removeprefix(_TRL) for text in given}
    return tuple(last.values()), [text for text in arguments if text not in given]


def main(config: GRPOCommand, name: str = "", trl: tuple[str, ...] = ()) -> None:
    """Train, and say in one line what it brought.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
    """
    config = chz.replace(config, trl=(*config.trl, *trl))
    as_program.train_and_tell(run.main, config, f"grpo-{name or config.dataset.label}")


def cli() -> None:
    """The console entry point."""
    recipe, options = recipe_in(expanded(sys.argv[1:]))
    trl, options = for_trl(options)
    run_cli(
        functools.partial(main, name=recipe, trl=trl),
        of_recipe(recipe) if recipe else GRPOCommand,
        whole_names(options),
        RECIPE_HELP + " trl.NAME=VALUE is any other argument of\nTRL's GRPOConfig.",
    )
