"""Train a model to solve cryptic crossword clues.

    python -m es_cookbook.recipes.crossword.train_cli
    python -m es_cookbook.recipes.crossword.train_cli --help

Without options it trains the bundled character-level model, which half knows how clues of the trial
set work; no network, no GPU. Any other model and data go the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=clues.jsonl dataset.prompt=words
    sampling.max_tokens=512
"""

import chz

from es_cookbook.recipes.crossword.dataset import CrosswordDatasetBuilder
from es_cookbook.recipes.recipe import FEWER_GENOMES, Recipe, RecipeConfig, program

RECIPE = Recipe(
    "crossword",
    CrosswordDatasetBuilder,
    es=FEWER_GENOMES,
    max_tokens=24,
    num_generations=20,
    eval_every=5,
    problems="clues",
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to solve cryptic clues with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
