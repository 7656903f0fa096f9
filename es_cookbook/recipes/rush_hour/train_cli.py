"""Train a model to solve Rush Hour boards.

    python -m es_cookbook.recipes.rush_hour.train_cli model_name=Qwen/Qwen2.5-0.5B-Instruct
    python -m es_cookbook.recipes.rush_hour.train_cli --help

Boards are generated, or come from `dataset.source`. It brings no model of its own: whatever can
follow the rules of the prompt can begin.
"""

import functools

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder
from es_cookbook.recipes.settings import (
    dataset_field,
    log_path_field,
    model_field,
    optimizer_field,
    sampling_field,
)
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams


@chz.chz
class CLIConfig(train.Config):
    """Train a model to solve Rush Hour boards with evolution strategies."""

    model_name: str = model_field("Qwen/Qwen2.5-0.5B-Instruct")
    dataset: RLDatasetBuilder = dataset_field(RushHourDatasetBuilder, "boards")
    optimizer: OptimizerBuilder = optimizer_field(RECOMMENDED)
    sampling: SamplingParams = sampling_field(max_tokens=512)
    log_path: str = log_path_field("rush_hour")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "rush_hour", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
