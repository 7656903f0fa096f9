"""Train a small model to play tic-tac-toe by letting its genomes play each other.

    python -m es_cookbook.recipes.tic_tac_toe.train_cli
    python -m es_cookbook.recipes.tic_tac_toe.train_cli --help

Without options it trains the bundled character-level model, which often overlooks that a move wins
or must block; no network, no GPU. Nobody shows it a better player: it only meets its like.
"""

import chz

from es_cookbook.recipes.recipe import FEWER_GENOMES, Recipe, RecipeConfig, program
from es_cookbook.recipes.tic_tac_toe.dataset import TicTacToeDatasetBuilder

RECIPE = Recipe(
    "tic_tac_toe",
    TicTacToeDatasetBuilder,
    es={**FEWER_GENOMES, "learning_rate": 0.1},
    max_tokens=2,
    num_generations=20,
    eval_every=4,
    problems="openings",
    main_metric="test/env/all/loses_to_random",
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to play tic-tac-toe with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
