"""Cut a run back to an earlier generation, in place; nothing is lost.

    python -m es_cookbook rewind runs/a generation=30
    python -m es_cookbook resume runs/a

The original run is kept in `rewound/<n>/` inside its directory, which is a run directory itself:
`fork` starts a new run from it. The run in W&B and Trackio stays as it is, and this one continues
there as a new run, `<name>-rewound-<n>`.
"""

from pathlib import Path

import chz

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.files import LARGEST_CONFIG, read_file
from es_cookbook.common.terminal import command, plural
from es_cookbook.plugins.branches.branches import rewind_run
from es_cookbook.runs.directory.directory import CONFIG, WANDB_ID


@chz.chz
class Rewind:
    """Cut a run back to an earlier generation, in place; the rest is kept in rewound/."""

    log_path: str = chz.field(doc="run directory", metadata=UNNAMED)
    generation: int = chz.field(doc="number of generations to keep")


def main(rewind: Rewind) -> None:
    """Cut, and print where the original is and how to continue."""
    log_path = Path(rewind.log_path)
    kept = rewind_run(log_path, rewind.generation)
    config = read_file(log_path / CONFIG, LARGEST_CONFIG, log_path).decode("utf-8", "replace")
    print(
        f"{log_path} holds {plural(rewind.generation, 'generation')} now, and {kept} the original "
        f"run; to go on: {command('resume', log_path=log_path)}"
    )
    libraries = ["W&B"] * (kept / WANDB_ID).exists() + ["Trackio"] * ("TrackioTracker" in config)
    if libraries:
        print(
            f"in {' and '.join(libraries)} it goes on as a new run, *-rewound-{kept.name}, from "
            f"generation {rewind.generation}; the one that is there stays as it is"
        )


def cli() -> None:
    run_cli(main, Rewind)
