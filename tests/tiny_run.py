"""A training run as a program, small enough to be killed and begun again in a test."""

import chz

from es_cookbook import train
from es_cookbook.cli import run_cli
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from tests.fakes import SmallDatasetBuilder


@chz.chz
class TinyConfig(train.Config):
    """A tiny run."""

    dataset: RLDatasetBuilder = chz.field(default_factory=SmallDatasetBuilder, doc="problems")
    optimizer: OptimizerBuilder = chz.field(
        default=ES(population_size=4, sigma=0.1, learning_rate=0.05), doc="how it moves"
    )
    sampling: SamplingParams = chz.field(
        default=SamplingParams(max_tokens=4, temperature=1.0), doc="how tokens are drawn"
    )
    num_generations: int = chz.field(default=12, doc="length")
    eval_every: int = chz.field(default=5, doc="evaluations")


if __name__ == "__main__":
    run_cli(train.run, TinyConfig)
