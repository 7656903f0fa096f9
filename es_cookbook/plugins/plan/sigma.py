"""Print the loss of genomes at each σ, and the σ that a run would choose.

    python -m es_cookbook sigma model_name=... data=rows.jsonl prompt="{question}" reward=exact
    python -m es_cookbook sigma recipe=chat dataset.task=extraction

A run with `optimizer.sigma=auto` does the same before its first generation
(`es_cookbook.population.step_sizes`). The other options are those of that run's command.
"""

import functools
from collections.abc import Mapping

import chz

from es_cookbook.cli.train import built_for
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.terminal import as_program
from es_cookbook.population.step_sizes import options_of
from es_cookbook.runs.evolution_run import tried_sigmas
from es_cookbook.runs.signals import result_until_signal


@chz.chz
class Sigma:
    """Print the loss of genomes at each sigma, and the sigma that a run would choose."""

    recipe: str = chz.field(default="train", doc="recipe of the options; train: your own rows")


@as_program()
def main(config: Sigma, fields: Mapping[str, str]) -> None:
    """Print the table, and the options to paste."""
    run = built_for(config.recipe, {"log_path": "", "optimizer.sigma": "auto", **fields})
    found = result_until_signal(functools.partial(tried_sigmas, run))
    print(found.table())
    options = options_of(run.optimizer, found.sigma, run.num_generations)
    print(*(f"optimizer.{name}={value:g}" for name, value in options.items()))


def cli() -> None:
    more_help = (
        "\n\nAny other option is one of the run's own command (model_name, data, dataset.task)."
    )
    run_with_fields(main, Sigma, more_help)
