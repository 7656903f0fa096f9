"""A run as it stands on the disk, for whoever looks at it: reports, lists, tables.

Looking differs from going on. What a run goes on from must be whole, and
`es_cookbook.runs.directory.opening` refuses it otherwise; what is looked at may be torn, or written
by a process that is still writing it. So everything here reads what can be
read, and says in a sentence what cannot. Nothing is changed, nothing that a file names is imported,
and no lock is taken.

    run = read_run(Path("runs/mine"))
    run.state, run.config["optimizer.sigma"], run.metrics[-1], len(run.records)
    for rollout in run.rollouts(): ...

The files are those of evolution strategies and of gradients alike; the latter have no history.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias, cast

from es_cookbook.common.errors import HistoryError, RunDirectoryError
from es_cookbook.common.files import (
    ANY_SIZE,
    lines,
    opened,
    parsed,
)
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.optimizers.base import AUTO
from es_cookbook.runs.directory.config_differences import flattened
from es_cookbook.runs.directory.directory import (
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    ROLLOUTS,
    Recorded,
    check_access,
    is_of_gradients,
)
from es_cookbook.runs.directory.lock import writer_of
from es_cookbook.runs.history.format import Header, Record
from es_cookbook.runs.history.store import readable_prefix
from es_cookbook.runs.tracking.jsonl import metrics_of_line

State: TypeAlias = Literal["not begun", "running", "interrupted", "complete"]


@dataclasses.dataclass(frozen=True, slots=True)
class RunFiles:
    """What could be read of a run directory.

    Attributes:
        path: as it was given.
        config: its Config as plain values by dotted path, `optimizer.sigma` for example; a part's
            class stands at the part's own path, `optimizer`; an `auto` is what the run found. Empty
            where it cannot be read.
        metrics: one dict a generation, and one for the last evaluation; NaN where not measured.
        header: what the run began with; None where the history cannot be read, and of gradients.
        records: of the history, in order; empty for a run of gradients.
        state: where it stands.
        problems: what could not be read, one sentence each.
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
        """Whether it was trained by gradients."""
        return is_of_gradients(self.path)

    @property
    def num_generations(self) -> int:
        """How many its Config asks for; 0 where that cannot be read."""
        return _length(self.config)

    @property
    def generations_done(self) -> int:
        """How many count: those of the history, or, of gradients, those that were measured."""
        if not self.is_gradient:
            return len(self.records)
        return min(len(self.metrics), self.num_generations)

    def rollouts(
        self, on_damage: Callable[[str], None] | None = None
    ) -> Iterator[dict[str, object]]:
        """The lines of `rollouts.jsonl`, one after the other, as they were written.

        Args:
            on_damage: is told, in a sentence, of lines that were left out.
        """
        damaged = 0
        for line in _lines(self.path / ROLLOUTS, on_damage):
            found = _json(line)
            if isinstance(found, dict) and type(found.get(GENERATION_KEYS[ROLLOUTS])) is int:
                yield cast("dict[str, object]", found)
            else:
                damaged += 1
        if damaged and on_damage:
            on_damage(f"{self.path / ROLLOUTS}: {plural(damaged, 'damaged line')} left out")


def read_run(log_path: Path) -> RunFiles:
    """Read a run directory, of a run that is in progress too.

    Raises:
        RunDirectoryError: There is no such directory, or it is not a run's, or of another version.
    """
    check_access(log_path)
    if not os.path.isdir(log_path):  # Which asks nothing of a name that is too long.
        found = "a file" if os.path.exists(log_path) else "nothing there"
        raise RunDirectoryError(f"log_path {log_path} must be a run directory, found {found}")
    problems: list[str] = []
    config = _config(log_path, problems)
    metrics = _metrics(log_path / METRICS, problems)
    history = readable_prefix(log_path / HISTORY)
    if history.damage is not None:  # What stands before it is good.
        problems.append(str(history.damage))
    header, records = history.header, [*history.records]
    for name, value in _chosen(header).items():
        if config.get(name) == AUTO:
            config[name] = value
    done = len(metrics) if is_of_gradients(log_path) else len(records)
    state = _state(log_path, done, metrics, _length(config))
    return RunFiles(log_path, config, metrics, header, records, state, tuple(problems))


def _config(log_path: Path, problems: list[str]) -> dict[str, object]:
    fields, problem = Recorded(log_path).fields
    try:
        if not problem:
            return flattened(fields)
    except ValueError as error:
        problem = f"cannot be read ({error})"
    if not any((log_path / name).is_file() for name in (HISTORY, METRICS)):
        raise RunDirectoryError(
            f"log_path {log_path} is not a run directory: its {CONFIG} {problem}, and it holds no "
            f"{HISTORY} or {METRICS}"
        )
    problems.append(f"{log_path / CONFIG} {problem}")
    return {}


def _metrics(path: Path, problems: list[str]) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    damaged: list[str] = []
    for number, line in enumerate(_lines(path, problems.append), start=1):
        try:
            rows.append(metrics_of_line(line, f"{path}, line {number}"))
        except HistoryError as error:
            damaged.append(str(error))
    problems += damaged[:1]
    if len(damaged) > 1:
        problems.append(f"{path}: {plural(len(damaged) - 1, 'more damaged line')} left out")
    return rows


def _chosen(header: Header | None) -> Mapping[str, object]:
    """What a run took for options that are `auto`, by their paths in its Config."""
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


def _lines(path: Path, on_damage: Callable[[str], None] | None) -> Iterator[bytes]:
    """The lines of a file except a torn last one; `on_damage` gets what stops reading."""
    try:
        with opened(path, ANY_SIZE, path.parent) as file:
            yield from (line for line in lines(file) if line.endswith(b"\n"))
    except FileNotFoundError:
        return
    except OSError as error:
        if on_damage:
            on_damage(f"{path} cannot be read: {error.strerror or error}")


def _json(line: bytes) -> object:
    try:
        return parsed(line)
    except ValueError:
        return None
