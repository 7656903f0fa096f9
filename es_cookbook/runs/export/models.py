"""A run as a model: `runs/mine` for where it stands, `runs/mine@12` for its 12th generation.

The centre of a generation is rebuilt from base and history, compared with what the run recorded,
and kept in the cache of converted models. So a run begins where another one ended.
"""

import functools
import hashlib
import json
import os
from pathlib import Path

from typing_extensions import override

from es_cookbook.checkpoints.model_files import Format, Part, cached_model
from es_cookbook.common.errors import ConfigError, ESCookbookError, ModelError, RunDirectoryError
from es_cookbook.common.terminal import plural, say
from es_cookbook.runs.directory.directory import HISTORY, Recorded, check_is_run, is_of_gradients
from es_cookbook.runs.history.store import first_generations

_SIGN = "@"
"""Between a run and the number of its generation."""
_FORMAT = 2
"""Version of the converted directories; raise it when they change."""
_DIGITS = 19
"""No generation has so many, and `int` refuses thousands."""
_rebuilding: set[Path] = set()
"""Runs whose centres are being rebuilt; a base may be a run again."""


class RunModels(Format):
    """The centre of a run after its last generation or an earlier one."""

    accepted = f"a run (runs/mine, runs/mine{_SIGN}GENERATION)"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        try:
            run = run_named(model_name)
            return None if run is None or is_of_gradients(run[0]) else _centre(*run)
        except ESCookbookError as error:  # A model's name cannot be given `trust`.
            hint = "; export it, and give model_name=that" if isinstance(error, ConfigError) else ""
            raise ModelError(f"model_name={model_name}: {error}{hint}") from error


def run_named(model_name: str) -> tuple[Path, int | None] | None:
    """Split a model name into a run directory and, if given, a generation; None if no run.

    Raises:
        ModelError: The text after the sign is not a generation.
    """
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
    if not Recorded(Path(path)).fields[0]:
        if generation:
            raise ModelError(f"{path!r} is not the directory of a run")
        return None
    return Path(path), int(generation) if generation else None


def _centre(log_path: Path, generation: int | None) -> Path:
    recorded = check_is_run(log_path)
    prefix = first_generations(recorded.history, log_path / HISTORY, generation)
    # The source of the rebuilt model. The header, in the history, has the digests of the base.
    config = json.dumps(recorded.fields[0], sort_keys=True).encode()
    source = hashlib.sha256(config).digest() + b"".join(prefix.encode())
    digest = hashlib.sha256(source).hexdigest()
    make = functools.partial(_rebuild, log_path, prefix.generations)
    here = log_path.resolve()
    if here in _rebuilding:
        raise RunDirectoryError(f"the base of {log_path} goes back to that run itself")
    _rebuilding.add(here)
    try:
        return cached_model(f"the run {str(log_path)!r:.300}", f"{digest}-run-{_FORMAT}", make)
    finally:
        _rebuilding.discard(here)


def _rebuild(log_path: Path, generation: int, directory: Path) -> None:
    from es_cookbook.runs.centre.replay import open_replay
    from es_cookbook.runs.export.forms import write_model

    say(f"{log_path}: rebuilding its centre after {plural(generation, 'generation')} once")
    replay = open_replay(log_path, generation)
    replay.check_base()
    write_model(directory, replay)
