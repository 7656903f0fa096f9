"""Train a model to search a corpus twice for an answer, in a chat of many turns.

    python -m es_cookbook.recipes.search.train_cli
    python -m es_cookbook.recipes.search.train_cli --help

Without options it trains the bundled model of 0.1 million parameters, which knows the tool; no
network, no GPU. It answers in good form from the beginning: what it gains is ability. A model of
the Hub is told of the tool by its chat template:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.prompt=words sampling.max_tokens=96
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.search.dataset import SearchDatasetBuilder
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
    """Train a model to search a corpus with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(SearchDatasetBuilder)
    optimizer: OptimizerBuilder = optimizer_field({"es": {**HALF_KNOWN, "population_size": 128}})
    sampling: SamplingParams = sampling_field(max_tokens=24)
    num_generations: int = num_generations_field(12)
    eval_every: int = eval_every_field(4)
    log_path: str = log_path_field("search")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "search", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
