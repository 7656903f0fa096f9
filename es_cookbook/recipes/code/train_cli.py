"""Train a model to write code that passes tests, which run in a sandbox (bubblewrap).

    python -m es_cookbook.recipes.code.train_cli
    python -m es_cookbook.recipes.code.train_cli --help

Without options it trains the bundled character-level model to complete expressions; no network, no
GPU. Any other model goes with rows in the format of MBPP or APPS:

    ... model_name=Qwen/Qwen2.5-Coder-0.5B-Instruct dataset.source=google-research-datasets/mbpp
    sampling.max_tokens=512
"""

import functools

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.code.dataset import CodeDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, RECOMMENDED
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
    """Train a model to write code that passes tests with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(CodeDatasetBuilder)
    optimizer: OptimizerBuilder = optimizer_field({"es": RECOMMENDED["es"]})
    sampling: SamplingParams = sampling_field(max_tokens=32)
    num_generations: int = num_generations_field(20)
    eval_every: int = eval_every_field(10)
    log_path: str = log_path_field("code")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "code", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
