"""Train a model to search a corpus twice for an answer, in a chat of many turns.

    python -m es_cookbook.recipes.search.train_cli
    python -m es_cookbook.recipes.search.train_cli --help

Without options it trains the bundled model of 0.1 million parameters, which knows the tool; no
network, no GPU. It already answers in good form: what it gains is ability. A model from
the Hub reads about the tool in its chat template:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.prompt=words sampling.max_tokens=96
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.search.dataset import SearchDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import FEWER_GENOMES, RecipeConfig, program


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to search a corpus with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(SearchDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": FEWER_GENOMES}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=24)
    num_generations: int = 12
    eval_every: int = 4


main, cli = program("search", CLIConfig)

if __name__ == "__main__":
    cli()
