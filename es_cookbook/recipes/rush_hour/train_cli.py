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
from es_cookbook.common.configs import Names
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings=RECOMMENDED)
_SAMPLING = functools.partial(SamplingParams, max_tokens=512)


@chz.chz
class CLIConfig(train.Config):
    """Train a model to solve Rush Hour boards with evolution strategies."""

    model_name: str = chz.field(
        default="Qwen/Qwen2.5-0.5B-Instruct", doc="Hugging Face model directory or Hub name"
    )
    dataset: RLDatasetBuilder = chz.field(
        default_factory=RushHourDatasetBuilder,
        blueprint_unspecified=RushHourDatasetBuilder,
        doc="boards to train on, and held-out ones",
    )
    optimizer: OptimizerBuilder = chz.field(
        meta_factory=_OPTIMIZERS,
        default_factory=_OPTIMIZERS.build_default,
        doc="how the population is made and the centre moves",
    )
    sampling: SamplingParams = chz.field(
        default_factory=_SAMPLING, blueprint_unspecified=_SAMPLING, doc="how tokens are drawn"
    )
    log_path: str = chz.field(
        default="", doc="run directory; runs/rush_hour-<digest of the options> if empty"
    )


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "rush_hour", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
