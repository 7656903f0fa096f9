"""Start a new run from the first generations of another, with some fields changed.

    python -m es_cookbook fork runs/a generation=30 output=runs/b optimizer.sigma=0.005
    python -m es_cookbook resume runs/b

The recorded steps give the centre from which the new run starts, regardless of its
optimizer, which takes over at generation t; one with state, such as momentum, starts there
as at the start of a run. The other run is only read.
"""

from pathlib import Path
from typing import cast

import chz

from es_cookbook.cli.options import Recorded
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.configs import config_to_json, trust_option
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.options import built
from es_cookbook.common.terminal import command
from es_cookbook.plugins.branches.branches import fork_run
from es_cookbook.population.step_sizes import options_of
from es_cookbook.runs.config import Config, recorded_config
from es_cookbook.runs.directory.directory import HISTORY
from es_cookbook.runs.history.store import read_header
from es_cookbook.runs.tracking.base import TrackerBuilder

_REFUSED = ("model_name", "search_space")
"""The meaning of recorded steps depends on these."""
_ALLOWED = sorted(set(chz.chz_fields(Config)) - {*_REFUSED, "log_path"})


@chz.chz
class Fork(Recorded):
    """Start a new run from the first generations of another, with some fields changed."""

    output: str = chz.field(doc="directory of the new run")
    generation: int | None = chz.field(default=None, doc="number of generations to take; None: all")


def main(fork: Fork, fields: dict[str, str]) -> None:
    """Make the new run's directory with these fields changed, and print how to continue."""
    source, output = Path(fork.log_path), Path(fork.output)
    recorded = recorded_config(source, fork.trust, fields)
    forked = chz.replace(built(recorded, fields), log_path=fork.output)
    for name in _REFUSED:
        if getattr(forked, name) != getattr(recorded, name):
            raise ConfigError(
                f"{name} cannot change in a fork, since the recorded steps would mean something "
                f"else; may change: {', '.join(_ALLOWED)}"
            )
    if forked.size and fork.generation != 0:
        raise ConfigError("size is chosen before the first generation, so it needs generation=0")
    for name in chz.chz_fields(forked.trackers):
        now, then = (getattr(config.trackers, name, None) for config in (forked, recorded))
        if isinstance(now, TrackerBuilder) and now.is_of_one_run and now == then:
            raise ConfigError(f"trackers.{name} must not be that of the other run: give another")
    header = read_header(source / HISTORY)
    is_alike = type(forked.optimizer) is type(recorded.optimizer)
    found = header.found if header and is_alike else {}
    optimizer = forked.optimizer.settled(found)  # Or it cannot begin.
    if forked.optimizer != recorded.optimizer and forked.optimizer.unsettled:
        # Another population or schedule has another rate, at the sigma that was found.
        sigma = cast(float, getattr(optimizer, "sigma", None))
        again = options_of(forked.optimizer, sigma, forked.num_generations)
        found = {name: sigma if name == "sigma" else again[name] for name in again}
    config = config_to_json(forked)
    taken = fork_run(source, fork.generation, output, config, found)
    begins = (
        f"with generations 1 to {taken} of {fork.log_path}; to go on"
        if taken
        else f"like {fork.log_path}, with no generation of it; to start"
    )
    resume = command("resume", log_path=fork.output, **trust_option(config))
    print(f"{fork.output} begins {begins}: {resume}")


def cli() -> None:
    more_help = (
        f"\n\nFields of the run's Config that may change: {', '.join(_ALLOWED)}.\n"
        f"{' and '.join(_REFUSED)} may not: the recorded steps would mean something else."
    )
    run_with_fields(main, Fork, more_help)
