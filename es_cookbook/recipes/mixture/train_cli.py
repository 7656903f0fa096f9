"""Train on several data sets at once, with all that chooses among their problems.

    python -m es_cookbook.recipes.mixture.train_cli
    python -m es_cookbook.recipes.mixture.train_cli dataset.replay=None dataset.filter=None
    python -m es_cookbook.recipes.mixture.train_cli --help

Without options it trains Countdown's bundled model on Countdown in three sizes; no network, no GPU.
"""

import chz

from es_cookbook.common.names import built_field
from es_cookbook.recipes.countdown import train_cli as countdown
from es_cookbook.recipes.mixture.dataset import CountdownMixture
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import program


@chz.chz
class CLIConfig(countdown.CLIConfig):
    """Train a model on a mixture of data sets with evolution strategies."""

    dataset: RLDatasetBuilder = built_field(CountdownMixture)
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=36)
    num_generations: int = 40


main, cli = program("mixture", CLIConfig)

if __name__ == "__main__":
    cli()
