"""Continue a run from its directory alone.

    python -m es_cookbook resume runs/my-run
    python -m es_cookbook resume runs/my-run engine=ray engine.num_engines=2

    python -m es_cookbook resume runs/my-run trust=my_package

The Config is rebuilt exactly from the directory, whichever recipe or script it came from. Classes
that are not es_cookbook's own are imported only from packages in `trust`.
"""

from pathlib import Path

import chz

from es_cookbook.cli.options import Recorded
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.options import built
from es_cookbook.common.terminal import BEGAN
from es_cookbook.runs.config import MAY_DIFFER, Config, config_of_kind
from es_cookbook.runs.directory.directory import check_is_run, locked
from es_cookbook.runs.program import train_and_tell


@chz.chz
class Resume(Recorded):
    """Continue a run from its directory alone."""


def main(resume: Resume, fields: dict[str, str]) -> None:
    """Continue training with these fields of the Config, and print the result in one line."""
    log_path = Path(resume.log_path)
    check_is_run(log_path)
    with locked(log_path) as recorded:
        config = built(config_of_kind(Config, recorded, resume.trust, fields), fields)
        config = chz.replace(config, log_path=resume.log_path, behavior_if_log_dir_exists="resume")
        train_and_tell(config, began=BEGAN, recorded=recorded)


def cli() -> None:
    more_help = (
        f"\n\nFields of the run's Config that may change: {', '.join(sorted(MAY_DIFFER))}.\n"
        "model_name and engine as long as the base is the same, bit for bit."
    )
    run_with_fields(main, Resume, more_help)
