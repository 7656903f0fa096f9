"""Checkpoints of a run of gradients: weights and optimizer state; only the last one is kept.

    checkpoints/<generation>/model       a Hugging Face model directory
    checkpoints/<generation>/optimizer.safetensors, state.json

The run can be used as a model: `model_name=runs/mine`, or `runs/mine@12` for generation 12.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

from typing_extensions import override

from es_cookbook.checkpoints.model_files import Format, Part
from es_cookbook.common.errors import ModelError, RunDirectoryError
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file, whole_directory
from es_cookbook.rl.types import ProblemResult
from es_cookbook.runs.directory.directory import CHECKPOINTS, MODEL, check_is_run, is_of_gradients
from es_cookbook.runs.export.models import run_named
from es_cookbook.runs.tracking.jsonl import finite

STATE = "state.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run after so many generations.

    Attributes:
        path: the directory; the weights are in `model`, in transformers' format.
        results: results of the problems, by generation, which are passed to the dataset on resume.
    """

    path: Path
    generation: int
    results: Sequence[Sequence[ProblemResult]]

    @property
    def model(self) -> Path:
        """The model directory."""
        return self.path / MODEL


class GradientModels(Format):
    """Models of runs of gradients, at their last checkpoints."""

    accepted = "a run of gradients"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        run = run_named(model_name)
        if run is None or not is_of_gradients(run[0]):
            return None
        log_path, generation = run
        try:
            check_is_run(log_path, or_of_gradients=True)
            last = last_directory(log_path)
        except RunDirectoryError as error:
            raise ModelError(f"model_name={model_name}: {error}") from error
        if last is None or not (last / MODEL).is_dir():
            raise ModelError(f"model_name={model_name}: {log_path} has no checkpoint yet")
        if generation not in (None, int(last.name)):
            raise ModelError(
                f"model_name={model_name}: a run of gradients keeps only its last checkpoint, and "
                f"that of {log_path} is {last.name}"
            )
        return last / MODEL


@contextlib.contextmanager
def next_checkpoint(log_path: Path, number: int) -> Generator[Path]:
    """Create the next checkpoint's directory atomically; then delete earlier ones."""
    directory = log_path / CHECKPOINTS
    directory.mkdir(exist_ok=True)
    with whole_directory(directory / str(number)) as path:
        yield path
    for path in directory.iterdir():
        if path.name != str(number):
            shutil.rmtree(path)


def last_directory(log_path: Path) -> Path | None:
    """Return the directory of the last checkpoint, named by the number of generations."""
    found = [p for p in (log_path / CHECKPOINTS).glob("*") if p.name.isdecimal()]
    return max(found, key=lambda path: int(path.name), default=None)


def latest_checkpoint(log_path: Path) -> Checkpoint | None:
    """Return the last checkpoint in a run directory.

    Raises:
        RunDirectoryError: It cannot be read.
    """
    path = last_directory(log_path)
    if path is None:
        return None
    try:
        state = cast("dict[str, Any]", parsed(read_file(path / STATE, LARGEST_TEXT, log_path)))
        results = [
            [
                ProblemResult(str(problem), *(math.nan if v is None else float(v) for v in values))
                for problem, *values in of_generation
            ]
            for of_generation in state["results"]
        ]
        return Checkpoint(path, int(state["generation"]), results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path} is not a complete checkpoint: {error}") from error


def state_json(generation: int, results: Sequence[Sequence[ProblemResult]]) -> str:
    """Return the content of `state.json`, which `latest_checkpoint` reads."""
    plain = [[dataclasses.astuple(each) for each in of_generation] for of_generation in results]
    return json.dumps(finite({"generation": generation, "results": plain}))
