"""Where a run of gradients stands in its directory: whether it begins, goes on, or is complete.

Told from names and small files, before a model is loaded. Generations after the last checkpoint are
run again, so their lines of metrics and rollouts are cut when the run goes on.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any, cast

from es_cookbook.baselines.gradient_config import MAY_DIFFER, GradientConfig
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.common.configs import config_to_json, read_config, text_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.files import (
    ANY_SIZE,
    LARGEST_TEXT,
    lines,
    opened,
    parsed,
    read_file,
    whole_directory,
)
from es_cookbook.rl.types import ProblemResult
from es_cookbook.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    TRAINED_ON,
    checked_names,
    failures_told,
    generation_of,
    lines_before,
    locked,
)
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.opening import decided, delete_run
from es_cookbook.runs.trusted.seal import seal, with_sealed

MODEL, STATE = "model", "state.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights after so many generations, and what else a run goes on from.

    Attributes:
        path: its directory; the weights are in `model`, as transformers reads them.
        dtype: with which the engine sampled.
        results: by generation, what the data set was told of its problems.
    """

    path: Path
    generation: int
    dtype: str
    results: Sequence[Sequence[ProblemResult]]

    @property
    def model(self) -> Path:
        """The model directory."""
        return self.path / MODEL


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
    with locked(log_path), failures_told(log_path):
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
    return DirectoryState(checkpoint, done and _last_line(log_path) == config.num_generations)


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


@contextlib.contextmanager
def next_checkpoint(log_path: Path, number: int) -> Generator[Path]:
    """Inside, a directory to write one to; kept whole or not at all, and those before it go."""
    directory = log_path / CHECKPOINTS
    directory.mkdir(exist_ok=True)
    with whole_directory(directory / str(number)) as path:
        yield path
    for path in directory.iterdir():
        if path.name != str(number):
            shutil.rmtree(path)


def last_directory(log_path: Path) -> Path | None:
    """Of the last checkpoint; its name is the number of generations, or steps."""
    found = [p for p in (log_path / CHECKPOINTS).glob("*") if p.name.isdecimal()]
    return max(found, key=lambda path: int(path.name), default=None)


def latest_checkpoint(log_path: Path) -> Checkpoint | None:
    """The last one in a run directory.

    Raises:
        RunDirectoryError: It is damaged.
    """
    path = last_directory(log_path)
    return None if path is None else read_checkpoint(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """What its `state.json` says.

    Raises:
        RunDirectoryError: It cannot be read.
    """
    try:
        state = cast(
            "dict[str, Any]", parsed(read_file(path / STATE, LARGEST_TEXT, path.parents[1]))
        )
        results = [
            [
                ProblemResult(str(problem), *(math.nan if v is None else float(v) for v in values))
                for problem, *values in of_generation
            ]
            for of_generation in state["results"]
        ]
        return Checkpoint(path, int(state["generation"]), str(state["dtype"]), results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path} is no whole checkpoint: {error}") from error


def state_json(generation: int, dtype: str, results: Sequence[Sequence[ProblemResult]]) -> str:
    """What `read_checkpoint` reads."""
    plain = [
        [
            (each.problem, *(v if math.isfinite(v) else None for v in (each.reward, each.solved)))
            for each in of_generation
        ]
        for of_generation in results
    ]
    return json.dumps({"generation": generation, "dtype": dtype, "results": plain})


def recorded_gradients(
    log_path: Path, trust: Collection[str] = (), typed: Collection[str] = ()
) -> GradientConfig | None:
    """The Config of a run of gradients; None where the directory is no such run's.

    Nothing is trained, tracked or pushed with it. `trust` and `typed` as of `recorded_config`.

    Raises:
        ConfigError: Its Config cannot be rebuilt here.
    """
    if not (log_path / CHECKPOINTS).is_dir() or (log_path / HISTORY).exists():
        return None
    path = log_path / CONFIG
    try:
        text = text_of(path)
        if "$class" not in json.loads(text):
            return None
    except (ConfigError, ValueError, TypeError):
        return None
    trust = with_sealed(log_path, text, trust)
    unused = ("hub", "trackers", "trl")
    return read_config(path, text, GradientConfig, trust, (*typed, *unused))


def _last_line(log_path: Path) -> int | None:
    """The generation of the last whole line of metrics."""
    path = log_path / METRICS
    if not path.exists():
        return None
    with opened(path, ANY_SIZE, log_path) as file:
        numbers = [generation_of(line, GENERATION_KEYS[METRICS]) for line in lines(file)]
    return max((number for number in numbers if number is not None), default=None)
