"""Print how far each step of a run moved its centre.

es-cookbook steps log_path=runs/mine
"""

import math
from pathlib import Path

import chz

from es_cookbook import open_run
from es_cookbook.common.cli import run_cli


@chz.chz
class Steps:
    """Print the length of each step of a run."""

    log_path: str = chz.field(doc="run directory")


def main(config: Steps) -> None:
    for record in open_run(Path(config.log_path)).records:
        squares = sum(term.coefficient**2 for term in record.step.terms)
        print(f"{record.generation + 1}  {math.sqrt(squares):.4g}")


def cli() -> None:
    run_cli(main, Steps)
