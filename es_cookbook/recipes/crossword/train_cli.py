"""Train a model to solve cryptic crossword clues.

    python -m es_cookbook.recipes.crossword.train_cli
    python -m es_cookbook.recipes.crossword.train_cli --help

Without options it trains the bundled character-level model, which half knows how clues of the trial
set work; no network, no GPU. Any other model and data go the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=clues.jsonl dataset.prompt=words
    sampling.max_tokens=512
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.crossword.dataset import CrosswordDatasetBuilder
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

_ES = {**HALF_KNOWN, "population_size": 128}


@chz.chz
class CLIConfig(train.Config):
    """Train a model to solve cryptic clues with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(CrosswordDatasetBuilder, "clues")
    optimizer: OptimizerBuilder = optimizer_field({"es": _ES})
    sampling: SamplingParams = sampling_field(max_tokens=24)
    num_generations: int = num_generations_field(20)
    eval_every: int = eval_every_field(5)
    log_path: str = log_path_field("crossword")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "crossword", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
