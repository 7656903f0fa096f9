"""Train a model on the problems of a reasoning-gym generator.

    python -m es_cookbook.recipes.logic.train_cli
    python -m es_cookbook.recipes.logic.train_cli dataset.task=gcd dataset.levels=0,1
    python -m es_cookbook.recipes.logic.train_cli --help

Without options it trains the bundled character-level model, which forgets the last term of most
sums of three digits; no network, no GPU. Any other model reads the questions in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.task=letter_counting dataset.prompt=words
    sampling.max_tokens=512
"""

import chz

from es_cookbook.recipes.logic.dataset import LogicDatasetBuilder
from es_cookbook.recipes.recipe import HALF_KNOWN, Recipe, RecipeConfig, program

RECIPE = Recipe(
    "logic",
    LogicDatasetBuilder,
    es=HALF_KNOWN,
    max_tokens=6,
    num_generations=40,
    eval_every=10,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model on problems of a reasoning-gym generator with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
