"""Cut a run back to an earlier generation, in place; nothing is lost.

    python -m es_cookbook rewind log_path=runs/a generation=30
    python -m es_cookbook resume log_path=runs/a

The run as it stood is kept in `rewound/<n>/` inside its directory, which is a run directory itself:
`fork` begins a new run from it.
"""

from pathlib import Path

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import command
from es_cookbook.runs.branches import rewind_run


@chz.chz
class Rewind:
    """Cut a run back to an earlier generation, in place; what is cut off is kept beside."""

    log_path: str = chz.field(doc="run directory")
    generation: int = chz.field(doc="how many generations stay, 0 on")


def main(rewind: Rewind) -> None:
    """Cut, and say where the rest is and how to go on."""
    kept = rewind_run(Path(rewind.log_path), rewind.generation)
    print(
        f"{rewind.log_path} holds {rewind.generation} generations now, and {kept} the run as it "
        f"stood; to go on: {command('resume')} log_path={rewind.log_path}"
    )


def cli() -> None:
    """The console entry point."""
    run_cli(main, Rewind)
