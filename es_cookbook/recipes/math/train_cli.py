r"""Train a model to solve mathematical problems.

    python -m es_cookbook.recipes.math.train_cli
    python -m es_cookbook.recipes.math.train_cli --help

Without options it trains the bundled model, which often leaves out a step, on generated word
problems; no network, no GPU. Any other model goes with rows in the format of GSM8K, MATH or
DeepScaleR:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=train.parquet dataset.prompt=boxed
    sampling.max_tokens=1024
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.math.dataset import MathDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import FEWER_GENOMES, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to solve mathematical problems with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(MathDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": FEWER_GENOMES}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=32)
    num_generations: int = 12
    eval_every: int = 4


main, cli = program("math", CLIConfig)

if __name__ == "__main__":
    cli()
