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

from collections.abc import Mapping
from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.evolution.schedules import Cosine
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import RecipeConfig, program

BUNDLED_MODEL = Path(__file__).parent / "model"
RECOMMENDED: Mapping[str, Mapping[str, object]] = {
    "es": {
        "population_size": 64,
        "sigma": 0.01,
        "learning_rate": 0.02,
        "learning_rate_schedule": Cosine(),
    },
    "clip_up": {"learning_rate": 0.0004, "max_speed": 0.001},
    "genetic": {"max_terms": 16},
}
"""The main job's settings, all of them; everything else is the default of `Config`."""


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to solve Countdown problems with evolution strategies."""

    model_name: str = str(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = built_field(CountdownDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames(RECOMMENDED).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=32)
    num_generations: int = 50
    eval_every: int = 10


main, cli = program("countdown", CLIConfig)

if __name__ == "__main__":
    cli()
