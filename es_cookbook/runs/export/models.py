"""A run as a model: `runs/mine` for where it stands, `runs/mine@12` for its 12th generation.

The centre of a generation is rebuilt from base and history, compared with what the run recorded,
and kept in the cache of converted models. A run of gradients keeps model directories itself, of its
last checkpoint alone. So a run of either kind begins where one of either kind ended.
"""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import TypeAlias

from typing_extensions import override

from es_cookbook.checkpoints.formats import Format, Part
from es_cookbook.checkpoints.model_cache import cached_model
from es_cookbook.common.errors import ConfigError, ESCookbookError, ModelError, RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, opened
from es_cookbook.common.terminal import plural, say
from es_cookbook.runs.centre.checkpoints import last_directory
from es_cookbook.runs.directory.directory import (
    HISTORY,
    MODEL,
    check_is_run,
    is_of_gradients,
    recorded_fields,
)
from es_cookbook.runs.history.store import read_prefix

_SIGN = "@"
"""Between a run and the number of its generation."""
_FORMAT = 2
"""Of a change after which the same generation is another model directory."""
_DIGITS = 19
"""No generation has so many, and `int` refuses thousands."""
_LONGEST_LINE_OF_RUNS = 16
"""Runs that begin one from the other: each of them is a model in the cache."""
_Run: TypeAlias = tuple[Path, int | None]
"""A run directory, and which of its generations."""


class RunModels(Format):
    """The centre of a run after its last generation or an earlier one."""

    accepted = f"a run (runs/mine, runs/mine{_SIGN}GENERATION)"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        try:
            if (run := _named(model_name)) is None:
                return None
            return _checkpoint(*run) if is_of_gradients(run[0]) else _centre(*run)
        except ESCookbookError as error:
            # Whom to trust is said where a run is named, and not where a model is.
            hint = "; export it, and give model_name=that" if isinstance(error, ConfigError) else ""
            raise ModelError(f"model_name={model_name}: {error}{hint}") from error


def _named(model_name: str) -> _Run | None:
    path, _, generation = model_name.rpartition(_SIGN)
    if os.path.isdir(model_name):  # Which asks nothing of a name that is too long.
        path, generation = model_name, ""
    elif not os.path.isdir(path):
        return None
    elif not (generation.isascii() and generation.isdecimal() and len(generation) < _DIGITS):
        raise ModelError(
            f"after {_SIGN} must be the number of generations "
            f"after which to take the run's centre, found {generation!r:.100}"
        )
    if not recorded_fields(Path(path))[0]:
        if generation:
            raise ModelError(f"{path!r} is not the directory of a run")
        return None
    return Path(path), int(generation) if generation else None


def _checkpoint(log_path: Path, generation: int | None) -> Path:
    check_is_run(log_path, or_of_gradients=True)
    last = last_directory(log_path)
    if last is None:
        raise RunDirectoryError(f"{log_path} has no checkpoint yet")
    if not (last / MODEL).is_dir():
        raise RunDirectoryError(f"{log_path} is of sft, whose model is its output")
    if generation not in (None, int(last.name)):
        raise RunDirectoryError(
            f"a run of gradients keeps its last checkpoint alone, and that of {log_path} is "
            f"{last.name}"
        )
    return last / MODEL


def _centre(log_path: Path, generation: int | None) -> Path:
    check_is_run(log_path)
    _refuse_rings(log_path)
    prefix = read_prefix(log_path / HISTORY, generation)
    # What it is rebuilt from. The header, in the history, has the digests of the base.
    with opened(log_path / HISTORY, ANY_SIZE, log_path) as file:
        recorded = file.read(prefix.num_bytes)
    config = json.dumps(recorded_fields(log_path)[0], sort_keys=True).encode()
    digest = hashlib.sha256(hashlib.sha256(config).digest() + recorded).hexdigest()
    make = functools.partial(_rebuild, log_path, prefix.generations)
    return cached_model(f"the run {str(log_path)!r:.300}", f"{digest}-run-{_FORMAT}", make)


def _rebuild(log_path: Path, generation: int, directory: Path) -> None:
    from es_cookbook.runs.centre.replay import open_replay
    from es_cookbook.runs.export.forms import write_model

    say(f"{log_path}: rebuilding its centre after {plural(generation, 'generation')} once")
    replay = open_replay(log_path, generation)
    replay.check_base()
    write_model(directory, replay)


def _refuse_rings(log_path: Path) -> None:
    """Refuse a run whose bases lead back to itself, or through more runs than anybody means."""
    found: list[Path] = []
    run: _Run | None = (log_path, None)
    while run is not None and not is_of_gradients(run[0]):
        if run[0].resolve() in found:
            raise RunDirectoryError(f"the base of {log_path} goes back to {run[0]} itself")
        found.append(run[0].resolve())
        if len(found) > _LONGEST_LINE_OF_RUNS:
            raise RunDirectoryError(
                f"{log_path} begins from a run that begins from a run, and so on, more than "
                f"{_LONGEST_LINE_OF_RUNS} times; export one of them, and begin from that"
            )
        base = recorded_fields(run[0])[0].get("model_name")
        run = _named(base) if isinstance(base, str) else None
