"""Where a run of gradients stands in its directory: whether it begins, goes on, or is complete.

Told from names and small files, before a model is loaded. Generations after the last checkpoint are
run again, so their lines of metrics and rollouts are cut when the run goes on.
"""

import contextlib
import dataclasses
from collections.abc import Generator
from pathlib import Path

from es_cookbook.baselines.gradient_config import MAY_DIFFER, GradientConfig
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.runs.checkpoints import MODEL, Checkpoint, latest_checkpoint
from es_cookbook.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    TRAINED_ON,
    checked_names,
    failures_logged,
    lines_before,
    locked,
)
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.opening import decided, delete_run, num_measured
from es_cookbook.runs.trusted.seal import seal


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryState:
    """What a run finds in its directory."""

    checkpoint: Checkpoint | None = None
    is_complete: bool = False


@contextlib.contextmanager
def run_directory(config: GradientConfig) -> Generator[DirectoryState]:
    """Inside, the run directory is this process's alone, and the run may begin or go on there.

    Raises:
        RunDirectoryError: As `state_of`, or another process writes the directory.
        ESCookbookError: There is no log_path, or what the run needs outside of this process is not
            there.
    """
    if not config.log_path:  # Commands make one up.
        raise ConfigError("log_path must name the directory of the run, found ''")
    log_path = Path(config.log_path)
    with locked(log_path), failures_logged(log_path):
        state = state_of(config)
        if not state.is_complete:
            config.trackers.check()
            if config.hub is not None:
                config.hub.check()
            config.dataset.check()
            model_directory(config.model_name)
        yield state


def state_of(config: GradientConfig) -> DirectoryState:
    """Look at the directory, which the caller has locked; a run that is to be deleted is.

    Raises:
        RunDirectoryError: Not a run's directory, one of another kind, another Config, or a run is
            there and `behavior_if_log_dir_exists` refuses.
    """
    log_path = Path(config.log_path)
    names = checked_names(log_path)
    checkpoint = latest_checkpoint(log_path)
    if not names or (checkpoint is None and names <= {CONFIG, TRAINED_ON}):
        return DirectoryState()
    behavior = config.behavior_if_log_dir_exists
    if behavior != "delete" and HISTORY in names:
        raise RunDirectoryError(
            f"log_path {log_path} holds a run of evolution strategies, which gradients cannot go "
            "on with; give another log_path"
        )
    config_json = config_to_json(config)
    elsewhere = f"begin from its weights: model_name={log_path}/{CHECKPOINTS}/GENERATION/{MODEL}"
    if decided(log_path, config_json, behavior, MAY_DIFFER, elsewhere) == "delete":
        delete_run(log_path)
        return DirectoryState()
    done = checkpoint is not None and checkpoint.generation == config.num_generations
    return DirectoryState(
        checkpoint, done and num_measured(log_path, METRICS) > config.num_generations
    )


def begin(config: GradientConfig, state: DirectoryState) -> int:
    """Keep the Config, cut what comes after the checkpoint; returns the first generation to run."""
    log_path = Path(config.log_path)
    start = state.checkpoint.generation if state.checkpoint else 0
    config_json = config_to_json(config)
    replace_file(log_path / CONFIG, [config_json.encode()])
    seal(log_path, config_json)
    cut_lines(log_path, start)
    return start


def cut_lines(log_path: Path, start: int) -> None:
    """Cut what is recorded of generations, or steps, from `start` on: they are done again."""
    for name, key in GENERATION_KEYS.items():
        if (log_path / name).exists():
            replace_file(log_path / name, list(lines_before(log_path / name, key, start)))
