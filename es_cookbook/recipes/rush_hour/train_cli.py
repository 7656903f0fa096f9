"""Train a model to solve Rush Hour boards.

    python -m es_cookbook.recipes.rush_hour.train_cli
    python -m es_cookbook.recipes.rush_hour.train_cli --help

Without options it trains the bundled character-level model, which often leaves out the last move,
on generated boards; no network, no GPU. Any other model reads the rules in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.prompt=words sampling.max_tokens=512
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import FEWER_GENOMES, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to solve Rush Hour boards with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(RushHourDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": {**FEWER_GENOMES, "sigma": 0.005}}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=32)
    num_generations: int = 20
    eval_every: int = 4


main, cli = program("rush_hour", CLIConfig)

if __name__ == "__main__":
    cli()
