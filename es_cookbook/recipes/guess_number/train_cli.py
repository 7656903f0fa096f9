"""Train a small model to guess numbers by halving what is left, in a chat of many turns.

    python -m es_cookbook.recipes.guess_number.train_cli
    python -m es_cookbook.recipes.guess_number.train_cli --help

Without options it trains the bundled character-level model of 0.2 million parameters; no network,
no GPU. It already answers in good form: what it gains is ability.
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.guess_number.dataset import GuessNumberDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import FEWER_GENOMES, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to guess numbers with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(GuessNumberDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": FEWER_GENOMES}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=4)
    num_generations: int = 12
    eval_every: int = 6


main, cli = program("guess_number", CLIConfig)

if __name__ == "__main__":
    cli()
