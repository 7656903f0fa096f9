"""Train a small model to play tic-tac-toe by letting its genomes play each other.

    python -m es_cookbook.recipes.tic_tac_toe.train_cli
    python -m es_cookbook.recipes.tic_tac_toe.train_cli --help

Without options it trains the bundled character-level model, which often overlooks that a move wins
or must block; no network, no GPU. Nobody shows it a better player: it only meets its like.
"""

import functools
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
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
from es_cookbook.recipes.tic_tac_toe.dataset import TicTacToeDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

BUNDLED_MODEL = Path(__file__).parent / "model"
LOSES = "test/env/all/loses_to_random"

_ES = {**HALF_KNOWN, "population_size": 128, "learning_rate": 0.1}


@chz.chz
class CLIConfig(train.Config):
    """Train a model to play tic-tac-toe with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: RLDatasetBuilder = dataset_field(TicTacToeDatasetBuilder, "openings")
    optimizer: OptimizerBuilder = optimizer_field({"es": _ES})
    sampling: SamplingParams = sampling_field(max_tokens=2)
    num_generations: int = num_generations_field(20)
    eval_every: int = eval_every_field(4)
    log_path: str = log_path_field("tic_tac_toe")

    @property
    @override
    def main_metric(self) -> str:
        return LOSES


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "tic_tac_toe", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
