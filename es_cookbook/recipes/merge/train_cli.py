"""Merge adapters of a chat model that were trained on different tasks, so that one does all tasks.

    python -m es_cookbook.recipes.merge.train_cli search_space.adapters=A,B optimizer=cma
    python -m es_cookbook.recipes.merge.train_cli --help

The README has the commands that train the two adapters; without `search_space.adapters` they are
expected where these write them. Only their coefficients are searched: two numbers, or with
`search_space.each=layer` two for each layer.
"""

import chz

from es_cookbook.common.names import Names, built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpaceBuilder
from es_cookbook.recipes.merge.dataset import ChatMixture
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program

ADAPTERS = ("adapters/sums", "adapters/extraction")
"""Where the commands of the README write the adapters."""
ES = {**HALF_KNOWN, "sigma": 0.2, "learning_rate": 0.2, "population_size": 16}


@chz.chz
class CLIConfig(RecipeConfig):
    """Search the coefficients of trained adapters with evolution strategies."""

    model_name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    dataset: RLDatasetBuilder = built_field(ChatMixture)
    search_space: SearchSpaceBuilder = Names(
        SEARCH_SPACE_NAMES, default="merge", settings={"merge": {"adapters": ADAPTERS}}
    ).field("parameters that genomes perturb, and how")
    optimizer: OptimizerBuilder = OptimizerNames({"es": ES, "cma": {"sigma": 0.2}}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=40)
    num_generations: int = 6
    eval_every: int = 3


main, cli = program("merge", CLIConfig)

if __name__ == "__main__":
    cli()
