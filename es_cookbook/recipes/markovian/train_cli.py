"""Train a model to write chains of thought from which alone its answers can be read.

    python -m es_cookbook.recipes.markovian.train_cli
    python -m es_cookbook.recipes.markovian.train_cli dataset.markovian=False
    python -m es_cookbook.recipes.markovian.train_cli --help

Without options it trains the bundled character-level model on sums of four digits; no network, no
GPU. It rather babbles than works a sum out. Any other model goes with rows, and in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=gsm8k.parquet dataset.template=words
    sampling.max_tokens=150 dataset.answer_tokens=10
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.markovian.dataset import MarkovianDatasetBuilder
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
    """Train a model to think so that its answer can be read, with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(MarkovianDatasetBuilder, "questions")
    optimizer: OptimizerBuilder = optimizer_field({"es": HALF_KNOWN})
    sampling: SamplingParams = sampling_field(max_tokens=12)
    num_generations: int = num_generations_field(32)
    eval_every: int = eval_every_field(4)
    log_path: str = log_path_field("markovian")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "markovian", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
