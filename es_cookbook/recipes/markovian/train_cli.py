"""Train a model to write chains of thought from which alone its answers can be read.

    python -m es_cookbook.recipes.markovian.train_cli
    python -m es_cookbook.recipes.markovian.train_cli dataset.markovian=False
    python -m es_cookbook.recipes.markovian.train_cli --help

Without options it trains the bundled character-level model on sums of four digits; no network, no
GPU. It rather babbles than works a sum out. Any other model goes with rows, and in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=gsm8k.parquet dataset.template=words
    sampling.max_tokens=150 dataset.answer_tokens=10
"""

import chz

from es_cookbook.recipes.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.recipes.recipe import HALF_KNOWN, Recipe, RecipeConfig, program

RECIPE = Recipe(
    "markovian",
    MarkovianDatasetBuilder,
    es=HALF_KNOWN,
    max_tokens=12,
    num_generations=32,
    eval_every=4,
    problems="questions",
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to think so that its answer can be read, with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
