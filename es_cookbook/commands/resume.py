"""Go on with a run, from its directory alone.

    python -m es_cookbook resume log_path=runs/my-run
    python -m es_cookbook resume log_path=runs/my-run engine=ray engine.num_engines=2

The Config is the one in the directory, rebuilt exactly, whichever recipe or script it came from.
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import changed, run_cli, split_options


@chz.chz
class Resume:
    """Go on with a run, from its directory alone."""

    log_path: str = chz.field(doc="run directory")


def main(resume: Resume, fields: dict[str, str]) -> None:
    """Train on, with these fields of the run's Config."""
    config = changed(train.recorded_config(Path(resume.log_path)), fields)
    train.run(chz.replace(config, log_path=resume.log_path, behavior_if_log_dir_exists="resume"))


def cli() -> None:
    """The console entry point."""
    own, fields = split_options(Resume)
    more_help = (
        f"\n\nFields of the run's Config that may change: {', '.join(sorted(train.MAY_DIFFER))}.\n"
        "model_name and engine as long as the base is the same, bit for bit."
    )
    run_cli(functools.partial(main, fields=fields), Resume, own, more_help)
