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
from es_cookbook.common.configs import Names
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.recipes.code.dataset import CodeDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, RECOMMENDED
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

_SETTINGS = {"es": RECOMMENDED["es"]}
_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings=_SETTINGS)
_SAMPLING = functools.partial(SamplingParams, max_tokens=32)


@chz.chz
class CLIConfig(train.Config):
    """Train a model to write code that passes tests with evolution strategies."""

    model_name: str = chz.field(
        default=str(BUNDLED_MODEL), doc="Hugging Face model directory or Hub name"
    )
    dataset: RLDatasetBuilder = chz.field(
        default_factory=CodeDatasetBuilder,
        blueprint_unspecified=CodeDatasetBuilder,
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
    num_generations: int = chz.field(default=20, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=10,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    log_path: str = chz.field(
        default="", doc="run directory; runs/code-<digest of the options> if empty"
    )


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "code", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
