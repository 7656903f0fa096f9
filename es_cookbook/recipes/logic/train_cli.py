"""Train a model on the problems of a reasoning-gym generator.

    python -m es_cookbook.recipes.logic.train_cli
    python -m es_cookbook.recipes.logic.train_cli dataset.task=gcd
    python -m es_cookbook.recipes.logic.train_cli --help

Without options it trains the bundled character-level model, which forgets the last term of most
sums of three digits; no network, no GPU. Any other model reads the questions in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.task=letter_counting dataset.prompt=words
    sampling.max_tokens=512
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.logic.dataset import LogicDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model on problems of a reasoning-gym generator with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(LogicDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=6)
    num_generations: int = 40
    eval_every: int = 10


main, cli = program("logic", CLIConfig)

if __name__ == "__main__":
    cli()
