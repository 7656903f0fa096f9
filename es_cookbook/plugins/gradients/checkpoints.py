"""Where a run of gradients stands in its directory: whether it begins, goes on, or is complete.

Told from names and small files, before a model is loaded. Generations after the last checkpoint are
run again, so their lines of metrics and rollouts are cut when the run goes on.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.plugins.gradients.gradient_config import MAY_DIFFER, GradientConfig
from es_cookbook.runs.centre.checkpoints import Checkpoint, latest_checkpoint
from es_cookbook.runs.directory.directory import (
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    TRAINED_ON,
    Recorded,
    checked_names,
    failures_logged,
    lines_before,
    locked,
)
from es_cookbook.runs.directory.opening import decided, delete_run, num_measured
from es_cookbook.runs.files import replace_file


@contextlib.contextmanager
def run_directory(config: GradientConfig) -> Generator[tuple[Checkpoint | None, bool]]:
    """Inside, the run directory is this process's alone, and the run may begin or go on there.

    Gives the checkpoint from which it goes on, if there is one, and whether it is complete.

    Raises:
        RunDirectoryError: Not a run's directory, one of another kind, another Config, a run is
            there and `behavior_if_log_dir_exists` refuses, or another process writes it.
        ESCookbookError: There is no log_path, or what the run needs outside of this process is not
            there.
    """
    if not config.log_path:  # Commands make one up.
        raise ConfigError("log_path must name the directory of the run, found ''")
    log_path = Path(config.log_path)
    with locked(log_path), failures_logged(log_path):
        checkpoint, is_complete = _state_of(config)
        if not is_complete:
            config.trackers.check()
            config.dataset.check()
            model_directory(config.model_name)
        yield checkpoint, is_complete


def _state_of(config: GradientConfig) -> tuple[Checkpoint | None, bool]:
    """Look at the directory; a run that is to be deleted is."""
    log_path = Path(config.log_path)
    names = checked_names(log_path)
    checkpoint = latest_checkpoint(log_path)
    if not names or (checkpoint is None and names <= {CONFIG, TRAINED_ON}):
        return None, False
    behavior = config.behavior_if_log_dir_exists
    if behavior != "delete" and HISTORY in names:
        raise RunDirectoryError(
            f"log_path {log_path} holds a run of evolution strategies, which gradients cannot go "
            "on with; give another log_path"
        )
    config_json = config_to_json(config)
    elsewhere = f"begin from its weights: model_name={log_path}"
    if decided(Recorded(log_path), config_json, behavior, MAY_DIFFER, elsewhere) == "delete":
        delete_run(log_path)
        return None, False
    last = config.num_generations
    is_done = checkpoint is not None and checkpoint.generation == last
    return checkpoint, is_done and num_measured(log_path, METRICS) > last


def begin(log_path: Path, config: object, start: int) -> None:
    """Keep the Config, and cut what is recorded of generations, or steps, from `start` on."""
    config_json = config_to_json(config)
    replace_file(log_path / CONFIG, [config_json.encode()])
    for name, key in GENERATION_KEYS.items():
        if (log_path / name).exists():
            replace_file(log_path / name, list(lines_before(log_path / name, key, start)))
