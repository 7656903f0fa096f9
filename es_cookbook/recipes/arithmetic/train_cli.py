"""Train a small model that half knows how to add, on a laptop, in a minute or two.

    python -m es_cookbook.recipes.arithmetic.train_cli
    python -m es_cookbook.recipes.arithmetic.train_cli seed=1 optimizer.sigma=0.005
    python -m es_cookbook.recipes.arithmetic.train_cli --help

Without options it trains the bundled character-level model of 0.11 million parameters on generated
additions; no network, no GPU. It already answers in good form: what it gains is ability.
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.arithmetic.dataset import ArithmeticDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to add numbers with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(ArithmeticDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=8)
    num_generations: int = 12
    eval_every: int = 4


main, cli = program("arithmetic", CLIConfig)

if __name__ == "__main__":
    cli()
