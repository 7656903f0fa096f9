"""Train on several data sets at once, with all that chooses among their problems.

    python -m es_cookbook.recipes.mixture.train_cli
    python -m es_cookbook.recipes.mixture.train_cli dataset.replay=None dataset.filter=None
    python -m es_cookbook.recipes.mixture.train_cli --help

Without options it trains Countdown's bundled model on Countdown in three sizes; no network, no GPU.
"""

import dataclasses

import chz

from es_cookbook.recipes.countdown import train_cli as countdown
from es_cookbook.recipes.mixture.dataset import CountdownMixture
from es_cookbook.recipes.recipe import RecipeConfig, program

RECIPE = dataclasses.replace(
    countdown.RECIPE,
    name="mixture",
    dataset=CountdownMixture,
    model_of="countdown",
    max_tokens=36,
    num_generations=40,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model on a mixture of data sets with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
