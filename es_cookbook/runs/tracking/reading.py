"""A run as it stands on the disk, read for reports, lists and tables.

Reading a run differs from continuing one. A run that continues must be whole, and
`es_cookbook.runs.directory.opening` refuses it otherwise; here files may be torn, or still being
written. So everything that can be read is returned, and each problem becomes a sentence. Nothing is
changed or locked, and nothing that a file names is imported.

    run = read_run(Path("runs/mine"))
    run.state, run.config["optimizer.sigma"], run.metrics[-1], len(run.records)
    for rollout in run.rollouts(): ...

The same for runs of gradients, which have no history. The functions below `read_run` name a run
where it is shown: its task and its method.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.terminal import one_line, plural
from es_cookbook.evolution.optimizers.base import AUTO
from es_cookbook.runs.directory.directory import (
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    ROLLOUTS,
    Recorded,
    check_access,
    is_of_gradients,
    read_metrics,
    read_rows,
    writer_of,
)
from es_cookbook.runs.directory.opening import flattened
from es_cookbook.runs.history.format import Header, Record

State: TypeAlias = Literal["not begun", "running", "interrupted", "complete"]
_RECIPE = re.compile(r"es_cookbook\.recipes\.([a-z0-9_]+)\.[\w.]+:\w+")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:([A-Za-z_][\w.]*)")
_TASKS = ("dataset.taskset", "dataset.game", "dataset.source")
"""Fields that name the task of data sets outside the recipes."""
_NOT_TRAINING = ("log_path", "behavior_if_log_dir_exists", "trackers", "profile")


@dataclasses.dataclass(frozen=True, slots=True)
class RunFiles:
    """Readable contents of a run directory.

    Attributes:
        path: path as it was given.
        config: the Config as plain values by dotted path, for example `optimizer.sigma`. The class
            of a part is at the path of the part (`optimizer`). An `auto` is replaced by the value
            that the run found. Empty if the Config cannot be read.
        metrics: one dict per generation, and one for the last evaluation; NaN if not measured.
        header: None if the history cannot be read, and for gradients.
        records: records of the history, in order; empty for gradients.
        problems: one sentence for each part that could not be read.
    """

    path: Path
    config: Mapping[str, object]
    metrics: list[dict[str, float]]
    header: Header | None
    records: list[Record]
    state: State
    problems: tuple[str, ...]

    @property
    def is_gradient(self) -> bool:
        """Whether the run was trained by gradients."""
        return is_of_gradients(self.path)

    @property
    def num_generations(self) -> int:
        """Number of generations in the Config; 0 if the Config cannot be read."""
        return _length(self.config)

    @property
    def generations_done(self) -> int:
        """Generations in the history; for gradients, those with metrics."""
        if not self.is_gradient:
            return len(self.records)
        return min(len(self.metrics), self.num_generations)

    def rollouts(
        self, on_damage: Callable[[str], None] | None = None
    ) -> Iterator[dict[str, object]]:
        """Yield the lines of `rollouts.jsonl`; `on_damage` gets a sentence about skipped lines."""
        damage: list[str] = []
        yield from read_rows(self.path / ROLLOUTS, _rollout, damage)
        for problem in _shortened(damage, self.path / ROLLOUTS):
            if on_damage:
                on_damage(problem)


def read_run(log_path: Path) -> RunFiles:
    """Read a run directory; the run may be in progress.

    Raises:
        RunDirectoryError: There is no such directory, it is not of a run, or it has another format
            version.
    """
    check_access(log_path)
    if not os.path.isdir(log_path):  # Accepts a name that is too long.
        found = "a file" if os.path.exists(log_path) else "nothing there"
        raise RunDirectoryError(f"log_path {log_path} must be a run directory, found {found}")
    recorded, damage = Recorded(log_path), list[str]()
    config, problems = _config(recorded)
    metrics = read_metrics(log_path / METRICS, damage)
    problems += _shortened(damage, log_path / METRICS)
    history = recorded.history
    if history.damage is not None:
        problems.append(str(history.damage))
    header, records = history.header, [*history.records]
    for name, value in _chosen(header).items():
        if config.get(name) == AUTO:
            config[name] = value
    done = len(metrics) if is_of_gradients(log_path) else len(records)
    state = _state(log_path, done, metrics, _length(config))
    return RunFiles(log_path, config, metrics, header, records, state, tuple(problems))


def _config(recorded: Recorded) -> tuple[dict[str, object], list[str]]:
    """Read the Config as plain values, and the problem with it, if any."""
    log_path, (fields, problem) = recorded.log_path, recorded.fields
    try:
        if not problem:
            return flattened(fields), []
    except ValueError as error:
        problem = f"cannot be read ({error})"
    if not any((log_path / name).is_file() for name in (HISTORY, METRICS)):
        raise RunDirectoryError(
            f"log_path {log_path} is not a run directory: its {CONFIG} {problem}, and it holds no "
            f"{HISTORY} or {METRICS}"
        )
    return {}, [f"{log_path / CONFIG} {problem}"]


def _chosen(header: Header | None) -> Mapping[str, object]:
    """Return values that the run found for options that are `auto`, by path in the Config."""
    if header is None:
        return {}
    found = {f"optimizer.{name}": value for name, value in header.found.items()}
    engines = ("engine", "engine.engine") if header.products is not None else ()
    return found | {f"{engine}.products": header.products for engine in engines}


def _state(log_path: Path, done: int, metrics: list[dict[str, float]], length: int) -> State:
    if writer_of(log_path) is not None:
        return "running"
    last = metrics[-1].get(GENERATION_KEYS[METRICS], math.nan) if metrics else math.nan
    if length and done >= length and last == length:
        return "complete"
    return "interrupted" if done or metrics else "not begun"


def _length(config: Mapping[str, object]) -> int:
    length = config.get("num_generations")
    return length if type(length) is int else 0


def _rollout(found: object) -> dict[str, object]:
    rollout = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    if type(rollout.get(GENERATION_KEYS[ROLLOUTS])) is not int:
        raise ValueError("it has no generation")
    return rollout


def _shortened(damage: Sequence[str], path: Path) -> Sequence[str]:
    """Return the first problem with a file, and the number of others."""
    if len(damage) < 2:
        return damage
    return [damage[0], f"{path}: {plural(len(damage) - 1, 'more damaged line')} left out"]


def is_of_training(path: str) -> bool:
    """Return whether a field of a Config, by dotted path, changes what is trained.

    >>> is_of_training("optimizer.sigma"), is_of_training("trackers.jsonl")
    (True, False)
    """
    return path.partition(".")[0] not in _NOT_TRAINING


def task_of(config: Mapping[str, object]) -> str:
    """Return the task of a run for a title; "unknown task" if its Config does not say.

    >>> task_of({"dataset": "es_cookbook.recipes.countdown.dataset:CountdownDatasetBuilder"})
    'Countdown'
    >>> task_of({"dataset": "es_cookbook.rl.data.task:Task", "dataset.source": "data/rows.jsonl"})
    'rows.jsonl'
    """
    if recipe := recipe_of(config):
        return recipe.replace("_", " ").capitalize()
    for field in _TASKS:
        if isinstance(source := config.get(field), str) and source:
            return one_line(source.rstrip("/").rpartition("/")[2])
    return class_name(config.get("dataset")) or "unknown task"


def recipe_of(config: Mapping[str, object]) -> str | None:
    """Return the recipe whose problems a run trains on; None for other problems."""
    for part in ("", "dataset"):
        if found := _RECIPE.fullmatch(str(config.get(part))):
            return found[1]
    return None


def class_name(text: object) -> str:
    """Return the class in "module:Class"; "" for any other value.

    >>> class_name("es_cookbook.evolution.optimizers.es:ES")
    'ES'
    """
    return found[1] if isinstance(text, str) and (found := _CLASS.fullmatch(text)) else ""


def method_of(run: RunFiles) -> str:
    """Return the method that trained a run: the optimizer, or the kind of gradients."""
    config = run.config
    if not run.is_gradient:
        return class_name(config.get("optimizer")) or "ES"
    if method := class_name(config.get("method")):
        return f"policy gradient ({method})"
    return "GRPO" if ".grpo" in str(config.get("")) else "gradients"
