"""Configs one after the other, in this process; and whether a run is complete.

What is complete is not run again, and an interrupted run goes on where it stopped: the same call is
repeated until all is done. What came out is then read from the run directories
(`es_cookbook.runs.report.comparison`), never from memory.
"""

from collections.abc import Sequence
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.configs import config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.runs.directory import HISTORY, METRICS
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import read_metrics


def run_all(configs: Sequence[train.Config]) -> None:
    """Run each to its end, in this order; go on with what is recorded, skip what is complete.

    Args:
        configs: each with a log_path of its own; `behavior_if_log_dir_exists` does not matter.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
        ESCookbookError: As `train.main`.
    """
    paths = [config.log_path for config in configs]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"every run needs a log_path of its own, found {path} more than once")
    for number, config in enumerate(configs, start=1):
        complete = is_complete(config)
        done = ", which is complete" if complete else ""
        print(f"run {number} of {len(configs)}: {config.log_path}{done}", flush=True)
        if not complete:
            try:
                train.run(chz.replace(config, behavior_if_log_dir_exists="resume"))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"interrupted in run {number} of {len(configs)}; give the same command again "
                    "to go on"
                ) from None


def is_complete(config: train.Config) -> bool:
    """Whether this very run, and not another one in its place, was recorded to its end."""
    log_path = Path(config.log_path)
    rows = read_metrics(log_path / METRICS)
    if not rows or rows[-1].get(GENERATION) != config.num_generations:
        return False
    recorded = sum(1 for _ in read_history(log_path / HISTORY))
    return recorded == config.num_generations and _is_same(config, log_path)


def _is_same(config: train.Config, log_path: Path) -> bool:
    """Whether the recorded Config is this one; if not, to resume it says what differs."""
    try:
        recorded = train.recorded_config(log_path, trust_of(config_to_json(config)))
    except (ConfigError, RunDirectoryError):  # Of a script's own classes, say; or none.
        return False
    here = {name: getattr(config, name) for name in train.MAY_DIFFER}
    return chz.replace(recorded, **here) == config
