"""Train a model to write code that passes tests, which run in a sandbox (bubblewrap).

    python -m es_cookbook.recipes.code.train_cli
    python -m es_cookbook.recipes.code.train_cli --help

Without options it trains the bundled character-level model to complete expressions; no network, no
GPU. Any other model goes with rows in the format of MBPP or APPS:

    ... model_name=Qwen/Qwen2.5-Coder-0.5B-Instruct dataset.source=google-research-datasets/mbpp
    sampling.max_tokens=512
"""

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.code.dataset import CodeDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, RECOMMENDED
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to write code that passes tests with evolution strategies."""

    model_name: str = str(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = built_field(CodeDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": RECOMMENDED["es"]}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=32)
    num_generations: int = 20
    eval_every: int = 10


main, cli = program("code", CLIConfig)

if __name__ == "__main__":
    cli()
