"""Train a model to write chains of thought from which alone its answers can be read.

    python -m es_cookbook.plugins.markovian.train_cli
    python -m es_cookbook.plugins.markovian.train_cli dataset.markovian=False
    python -m es_cookbook.plugins.markovian.train_cli --help

Without options it trains the bundled character-level model on sums of four digits, without a
network or GPU. For other models, use rows and prompts in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=gsm8k.parquet dataset.template=words
    sampling.max_tokens=150 dataset.answer_tokens=10
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.plugins.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to write thoughts from which its answers can be read."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(MarkovianDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=12)
    num_generations: int = 32
    eval_every: int = 4


main, cli = program("markovian", CLIConfig)

if __name__ == "__main__":
    cli()
