"""Train a model for one thing, and keep another by preference pairs.

    python -m es_cookbook.recipes.alignment.train_cli
    python -m es_cookbook.recipes.alignment.train_cli preference.weight=0
    python -m es_cookbook.recipes.alignment.train_cli --help

The task is the recipe conciseness: answer briefly. Its reward looks at length alone, and the model
forgets on the way what is right. Pairs of a right and a wrong answer, both brief, are a second
objective with a weight: the right one should stay the likelier one. No network, no GPU.
"""

import functools
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.recipes.conciseness import train_cli as conciseness
from es_cookbook.recipes.settings import built_field, log_path_field
from es_cookbook.rl.regularisers.preference_pairs import PreferencePairs
from es_cookbook.runs.tracking.jsonl import CORRECT

PAIRS = Path(__file__).parent / "pairs.jsonl"

_PAIRS = functools.partial(
    PreferencePairs, source=str(PAIRS), chat=False, weight=100.0, problems_per_generation=32
)


@chz.chz
class CLIConfig(conciseness.CLIConfig):
    """Train a model to answer briefly with evolution strategies, and to stay right."""

    preference: PreferencePairs | None = built_field(
        _PAIRS, "right answers likelier than wrong ones: with preference.weight=0 only reported"
    )
    log_path: str = log_path_field("alignment")

    @property
    @override
    def main_metric(self) -> str:
        return CORRECT


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "alignment", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
