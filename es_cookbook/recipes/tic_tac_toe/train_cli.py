"""Train a small model to play tic-tac-toe by letting its genomes play each other.

    python -m es_cookbook.recipes.tic_tac_toe.train_cli
    python -m es_cookbook.recipes.tic_tac_toe.train_cli --help

Without options it trains the bundled character-level model, which often overlooks that a move wins
or must block; no network, no GPU. It learns from games between its own genomes alone.
"""

from pathlib import Path
from typing import ClassVar

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.tic_tac_toe.dataset import TicTacToeDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import FEWER_GENOMES, RecipeConfig, program

ES = {**FEWER_GENOMES, "learning_rate": 0.1}


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to play tic-tac-toe with evolution strategies."""

    main_metric: ClassVar[str] = "test/env/all/loses_to_random"

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(TicTacToeDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": ES}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=2)
    num_generations: int = 20
    eval_every: int = 4


main, cli = program("tic_tac_toe", CLIConfig)

if __name__ == "__main__":
    cli()
