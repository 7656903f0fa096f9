"""Train a model to search a corpus twice for an answer, in a chat of many turns.

    python -m es_cookbook.recipes.search.train_cli
    python -m es_cookbook.recipes.search.train_cli --help

Without options it trains the bundled model of 0.1 million parameters, which knows the tool; no
network, no GPU. It already answers in good form: what it gains is ability. A model of
the Hub is told of the tool by its chat template:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.prompt=words sampling.max_tokens=96
"""

import chz

from es_cookbook.recipes.recipe import FEWER_GENOMES, Recipe, RecipeConfig, program
from es_cookbook.recipes.search.dataset import SearchDatasetBuilder

RECIPE = Recipe(
    "search",
    SearchDatasetBuilder,
    es=FEWER_GENOMES,
    max_tokens=24,
    num_generations=12,
    eval_every=4,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to search a corpus with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
