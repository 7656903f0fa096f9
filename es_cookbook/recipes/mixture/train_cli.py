"""Train on several data sets at once, with all that chooses among their problems.

    python -m es_cookbook.recipes.mixture.train_cli
    python -m es_cookbook.recipes.mixture.train_cli dataset.replay=None dataset.filter=None
    python -m es_cookbook.recipes.mixture.train_cli --help

Without options it trains Countdown's bundled model on Countdown in three sizes; no network, no GPU.
"""

import functools

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, RECOMMENDED
from es_cookbook.recipes.mixture.dataset import CountdownMixture
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


@chz.chz
class CLIConfig(train.Config):
    """Train a model on a mixture of data sets with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(CountdownMixture)
    optimizer: OptimizerBuilder = optimizer_field(RECOMMENDED)
    sampling: SamplingParams = sampling_field(max_tokens=36)
    num_generations: int = num_generations_field(40)
    eval_every: int = eval_every_field(10)
    log_path: str = log_path_field("mixture")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "mixture", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
