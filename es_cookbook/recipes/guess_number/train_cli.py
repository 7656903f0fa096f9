"""Train a small model to guess numbers by halving what is left, in a chat of many turns.

    python -m es_cookbook.recipes.guess_number.train_cli
    python -m es_cookbook.recipes.guess_number.train_cli --help

Without options it trains the bundled character-level model of 0.2 million parameters; no network,
no GPU. It already answers in good form: what it gains is ability.
"""

import chz

from es_cookbook.recipes.guess_number.dataset import GuessNumberDatasetBuilder
from es_cookbook.recipes.recipe import FEWER_GENOMES, Recipe, RecipeConfig, program

RECIPE = Recipe(
    "guess_number",
    GuessNumberDatasetBuilder,
    es=FEWER_GENOMES,
    max_tokens=4,
    num_generations=12,
    eval_every=6,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to guess numbers with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
