"""Train a model to solve Rush Hour boards.

    python -m es_cookbook.recipes.rush_hour.train_cli
    python -m es_cookbook.recipes.rush_hour.train_cli --help

Without options it trains the bundled character-level model, which often leaves out the last move,
on generated boards; no network, no GPU. Any other model reads the rules in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.prompt=words sampling.max_tokens=512
"""

import chz

from es_cookbook.recipes.recipe import FEWER_GENOMES, Recipe, RecipeConfig, program
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder

RECIPE = Recipe(
    "rush_hour",
    RushHourDatasetBuilder,
    es={**FEWER_GENOMES, "sigma": 0.005},
    max_tokens=32,
    num_generations=20,
    eval_every=4,
    problems="boards",
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to solve Rush Hour boards with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
