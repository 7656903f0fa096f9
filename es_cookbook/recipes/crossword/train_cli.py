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
from es_cookbook.common.configs import Names
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
from es_cookbook.recipes.crossword.dataset import CrosswordDatasetBuilder
from es_cookbook.recipes.settings import HALF_KNOWN
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

BUNDLED_MODEL = Path(__file__).parent / "model"

_ES = {**HALF_KNOWN, "population_size": 128}
_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings={**RECOMMENDED, "es": _ES})
_SAMPLING = functools.partial(SamplingParams, max_tokens=24)


@chz.chz
class CLIConfig(train.Config):
    """Train a model to solve cryptic clues with evolution strategies."""

    model_name: str = chz.field(
        default=str(BUNDLED_MODEL), doc="Hugging Face model directory or Hub name"
    )
    dataset: RLDatasetBuilder = chz.field(
        default_factory=CrosswordDatasetBuilder,
        blueprint_unspecified=CrosswordDatasetBuilder,
        doc="clues to train on, and held-out ones",
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
        default=5,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    log_path: str = chz.field(
        default="", doc="run directory; runs/crossword-<digest of the options> if empty"
    )


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "crossword", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
