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
from es_cookbook.common.configs import Names
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, RECOMMENDED
from es_cookbook.recipes.mixture.dataset import CountdownMixture
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings=RECOMMENDED)
_SAMPLING = functools.partial(SamplingParams, max_tokens=36)


@chz.chz
class CLIConfig(train.Config):
    """Train a model on a mixture of data sets with evolution strategies."""

    model_name: str = chz.field(
        default=str(BUNDLED_MODEL), doc="Hugging Face model directory or Hub name"
    )
    dataset: RLDatasetBuilder = chz.field(
        default_factory=CountdownMixture,
        blueprint_unspecified=CountdownMixture,
        doc="problems to train on, and held-out ones",
    )
    optimizer: OptimizerBuilder = chz.field(
        meta_factory=_OPTIMIZERS,
        default_factory=_OPTIMIZERS.build_default,
        doc="how the population is made and the centre moves",
    )
    sampling: SamplingParams = chz.field(
        default_factory=_SAMPLING, blueprint_unspecified=_SAMPLING, doc="how tokens are drawn"
    )
    num_generations: int = chz.field(default=40, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=10,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    log_path: str = chz.field(
        default="", doc="run directory; runs/mixture-<digest of the options> if empty"
    )


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "mixture", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
