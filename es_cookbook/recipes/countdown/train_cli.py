"""Train a small model to solve Countdown, on a laptop, in minutes.

    python -m es_cookbook.recipes.countdown.train_cli
    python -m es_cookbook.recipes.countdown.train_cli seed=1 optimizer.sigma=0.01
    python -m es_cookbook.recipes.countdown.train_cli --help

Without options it trains the bundled character-level model, which can already solve some problems
but often does not, on generated problems; no network, no GPU. Any other model and data go the same
way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=Jiayi-Pan/Countdown-Tasks-3to4
    dataset.prompt=paper
"""

import chz

from es_cookbook.common.schedules import Cosine
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.recipe import Recipe, RecipeConfig, program

RECIPE = Recipe(
    "countdown",
    CountdownDatasetBuilder,
    # The main job's settings, all of them; everything else is `train.Config`'s own default.
    es={
        "population_size": 64,
        "sigma": 0.01,
        "learning_rate": 0.02,
        "learning_rate_schedule": Cosine(),
    },
    optimizers={
        "clip_up": {"learning_rate": 0.0004, "max_speed": 0.001},
        "genetic": {"max_terms": 16},
    },
    max_tokens=32,
    num_generations=50,
    eval_every=10,
)
BUNDLED_MODEL, RECOMMENDED = RECIPE.model, RECIPE.settings


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to solve Countdown problems with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
