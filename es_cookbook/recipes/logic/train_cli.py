"""Train a model on the problems of a reasoning-gym generator.

    python -m es_cookbook.recipes.logic.train_cli
    python -m es_cookbook.recipes.logic.train_cli dataset.task=gcd dataset.levels=0,1
    python -m es_cookbook.recipes.logic.train_cli --help

Without options it trains the bundled character-level model, which forgets the last term of most
sums of three digits; no network, no GPU. Any other model reads the questions in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.task=letter_counting dataset.prompt=words
    sampling.max_tokens=512
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.logic.dataset import LogicDatasetBuilder
from es_cookbook.recipes.settings import (
    HALF_KNOWN,
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


@chz.chz
class CLIConfig(train.Config):
    """Train a model on problems of a reasoning-gym generator with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(LogicDatasetBuilder)
    optimizer: OptimizerBuilder = optimizer_field({"es": HALF_KNOWN})
    sampling: SamplingParams = sampling_field(max_tokens=6)
    num_generations: int = num_generations_field(40)
    eval_every: int = eval_every_field(10)
    log_path: str = log_path_field("logic")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "logic", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
