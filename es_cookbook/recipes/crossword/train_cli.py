"""Train a model to solve cryptic crossword clues.

    python -m es_cookbook.recipes.crossword.train_cli
    python -m es_cookbook.recipes.crossword.train_cli --help

Without options it trains the bundled character-level model, which half knows how clues of the trial
set work; no network, no GPU. Any other model and data go the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=clues.jsonl dataset.prompt=words
    sampling.max_tokens=512
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.crossword.dataset import CrosswordDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import FEWER_GENOMES, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to solve cryptic clues with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(CrosswordDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": FEWER_GENOMES}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=24)
    num_generations: int = 20
    eval_every: int = 5


main, cli = program("crossword", CLIConfig)

if __name__ == "__main__":
    cli()
