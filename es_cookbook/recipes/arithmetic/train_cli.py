"""Train a small model that half knows how to add, on a laptop, in a minute or two.

    python -m es_cookbook.recipes.arithmetic.train_cli
    python -m es_cookbook.recipes.arithmetic.train_cli seed=1 optimizer.sigma=0.005
    python -m es_cookbook.recipes.arithmetic.train_cli --help

Without options it trains the bundled character-level model of 0.11 million parameters on generated
additions; no network, no GPU. It already answers in good form: what it gains is ability.
"""

import chz

from es_cookbook.recipes.arithmetic.dataset import ArithmeticDatasetBuilder
from es_cookbook.recipes.recipe import HALF_KNOWN, Recipe, RecipeConfig, program

RECIPE = Recipe(
    "arithmetic",
    ArithmeticDatasetBuilder,
    es=HALF_KNOWN,
    max_tokens=8,
    num_generations=12,
    eval_every=4,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to add numbers with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
