"""One run of a sweep, in a process of its own; `workers` starts it.

    python -m es_cookbook.train.sweep.worker cores=0,1 < config

Its standard input is the run's Config, one line of JSON, and stays open for as long as the sweep's
process lives: when it ends, the run is interrupted, ready to go on. Exit codes are those of every
command.
"""

import os
import signal
import sys
import threading

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, trust_of
from es_cookbook.common.errors import ConfigError


@chz.chz
class Worker:
    """Train with the Config that comes by the standard input."""

    cores: tuple[int, ...] = chz.field(default=(), doc="of this machine, to stay on; all if empty")
    scripts: tuple[str, ...] = chz.field(default=(), doc="whose classes the Config names")


def main(worker: Worker) -> None:
    """Train, or go on; a run that is complete is left as it is."""
    if worker.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, worker.cores)
    text = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    config = config_from_json(text, [*trust_of(text), *worker.scripts])
    if not isinstance(config, train.Config):
        raise ConfigError(f"a sweep trains with a train.Config, found {type(config).__name__}")
    train.run(chz.replace(config, behavior_if_log_dir_exists="resume"))


def _end_with_parent() -> None:
    """Interrupt this process when the standard input ends."""
    while os.read(0, 1):  # Not by `sys.stdin`, whose lock would be held when this process ends.
        pass
    os.kill(os.getpid(), signal.SIGINT)


def cli() -> None:
    run_cli(main, Worker)


if __name__ == "__main__":
    cli()
