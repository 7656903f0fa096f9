r"""Train a model to solve mathematical problems.

    python -m es_cookbook.recipes.math.train_cli
    python -m es_cookbook.recipes.math.train_cli --help

Without options it trains the bundled model, which often leaves out a step, on generated word
problems; no network, no GPU. Any other model goes with rows in the format of GSM8K, MATH or
DeepScaleR:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=train.parquet dataset.prompt=boxed
    sampling.max_tokens=1024
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import Names
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
from es_cookbook.recipes.math.dataset import MathDatasetBuilder
from es_cookbook.recipes.settings import HALF_KNOWN
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

BUNDLED_MODEL = Path(__file__).parent / "model"

# No pairs and large steps: what the bundled model has to unlearn is one direction (README).
_ES = {**HALF_KNOWN, "population_size": 128}
_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings={**RECOMMENDED, "es": _ES})
_SAMPLING = functools.partial(SamplingParams, max_tokens=32)


@chz.chz
class CLIConfig(train.Config):
    """Train a model to solve mathematical problems with evolution strategies."""

    model_name: str = chz.field(
        default=str(BUNDLED_MODEL), doc="Hugging Face model directory or Hub name"
    )
    dataset: RLDatasetBuilder = chz.field(
        default_factory=MathDatasetBuilder,
        blueprint_unspecified=MathDatasetBuilder,
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
    num_generations: int = chz.field(default=12, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=4,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    log_path: str = chz.field(
        default="", doc="run directory; runs/math-<digest of the options> if empty"
    )


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "math", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
