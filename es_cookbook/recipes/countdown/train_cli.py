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

import functools
from collections.abc import Mapping
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.schedules import Cosine
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.settings import (
    dataset_field,
    eval_every_field,
    log_path_field,
    model_field,
    num_generations_field,
    optimizer_field,
    sampling_field,
)
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

BUNDLED_MODEL = Path(__file__).parent / "model"

RECOMMENDED: Mapping[str, Mapping[str, object]] = {
    # The main job's settings, all of them; everything else is `train.Config`'s own default.
    "es": {
        "population_size": 64,
        "sigma": 0.01,
        "learning_rate": 0.02,
        "learning_rate_schedule": Cosine(),
    },
    "clip_up": {"learning_rate": 0.0004, "max_speed": 0.001},
    "genetic": {"max_terms": 16},
}
"""Settings of `es` for the main job, which others take (`OptimizerBuilder.carried`), and theirs."""


@chz.chz
class CLIConfig(train.Config):
    """Train a model to solve Countdown problems with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(CountdownDatasetBuilder)
    optimizer: OptimizerBuilder = optimizer_field(RECOMMENDED)
    sampling: SamplingParams = sampling_field(max_tokens=32)
    num_generations: int = num_generations_field(50)
    eval_every: int = eval_every_field(10)
    log_path: str = log_path_field("countdown")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "countdown", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
