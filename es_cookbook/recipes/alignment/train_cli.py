"""Train a model for one thing, and keep another by preference pairs.

    python -m es_cookbook.recipes.alignment.train_cli
    python -m es_cookbook.recipes.alignment.train_cli preference.weight=0
    python -m es_cookbook.recipes.alignment.train_cli --help

The task is the recipe conciseness: answer briefly. Its reward looks at length alone, and the model
forgets how to answer correctly. Pairs of a right and a wrong answer, both brief, are a second
objective with a weight: the right one should stay the likelier one. No network, no GPU.
"""

from pathlib import Path
from typing import ClassVar

import chz

from es_cookbook.common.names import built_field
from es_cookbook.plugins.regularisers.preference import PreferencePairs
from es_cookbook.recipes.conciseness import train_cli as conciseness
from es_cookbook.runs.program import program
from es_cookbook.runs.tracking.jsonl import CORRECT

PAIRS = Path(__file__).parent / "pairs.jsonl"


@chz.chz
class CLIConfig(conciseness.CLIConfig):
    """Train a model to answer briefly with evolution strategies, and to stay right."""

    main_metric: ClassVar[str] = CORRECT

    preference: PreferencePairs | None = built_field(
        PreferencePairs,
        "right answers likelier than wrong ones: with preference.weight=0 only reported",
        source=str(PAIRS),
        chat=False,
        weight=100.0,
        problems_per_generation=32,
    )


main, cli = program("alignment", CLIConfig)

if __name__ == "__main__":
    cli()
