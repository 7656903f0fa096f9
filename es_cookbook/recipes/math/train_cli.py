r"""Train a model to solve mathematical problems.

    python -m es_cookbook.recipes.math.train_cli
    python -m es_cookbook.recipes.math.train_cli --help

Without options it trains the bundled model, which often leaves out a step, on generated word
problems; no network, no GPU. Any other model goes with rows in the format of GSM8K, MATH or
DeepScaleR:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=train.parquet dataset.prompt=boxed
    sampling.max_tokens=1024
"""

import chz

from es_cookbook.recipes.math.dataset import MathDatasetBuilder
from es_cookbook.recipes.recipe import FEWER_GENOMES, Recipe, RecipeConfig, program

RECIPE = Recipe(
    "math",
    MathDatasetBuilder,
    es=FEWER_GENOMES,
    max_tokens=32,
    num_generations=12,
    eval_every=4,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to solve mathematical problems with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
