"""Train a model to write code that passes tests, which run in a sandbox (bubblewrap).

    python -m es_cookbook.recipes.code.train_cli
    python -m es_cookbook.recipes.code.train_cli --help

Without options it trains the bundled character-level model to complete expressions; no network, no
GPU. Any other model goes with rows in the format of MBPP or APPS:

    ... model_name=Qwen/Qwen2.5-Coder-0.5B-Instruct dataset.source=google-research-datasets/mbpp
    sampling.max_tokens=512
"""

import chz

from es_cookbook.recipes.code.dataset import CodeDatasetBuilder
from es_cookbook.recipes.countdown import train_cli as countdown
from es_cookbook.recipes.recipe import Recipe, RecipeConfig, program

RECIPE = Recipe(
    "code",
    CodeDatasetBuilder,
    es=countdown.RECIPE.es,
    model_of="countdown",
    max_tokens=32,
    num_generations=20,
    eval_every=10,
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to write code that passes tests with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
