"""Snapshots while a run goes on, from its history alone, in a thread of their own.

A snapshot begins at the one before it, and reads only what the history has gained since: in a long
run it takes no longer than in a short one. Nothing that a run does depends on them: one that cannot
be written is a warning, and one that was not finished when the process died is missing. Which of
them can be used is found out by `es_cookbook.runs.centre.replay`.
"""

import contextlib
import logging
import threading
from collections.abc import Collection, Generator, Iterable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING

from es_cookbook.common.errors import ESCookbookError, RunDirectoryError
from es_cookbook.common.files import PARTIAL_SUFFIX, fsync
from es_cookbook.runs.directory.directory import SNAPSHOT_SUFFIX, SNAPSHOTS
from es_cookbook.runs.tracking.base import Tracker

if TYPE_CHECKING:
    import torch

    from es_cookbook.runs.centre.replay import Replay

_logger = logging.getLogger(__name__)


class SnapshotWriter(Tracker):
    """Writes a snapshot every so many generations (none if 0), one at a time.

    `model_name` is where the base is now, where the run's Config has it if None; `trust` is what
    that Config needs to be read back.
    """

    def __init__(
        self,
        log_path: Path,
        every: int,
        model_name: str | None = None,
        trust: Collection[str] = (),
    ) -> None:
        self._log_path = log_path
        self._model_name = model_name
        self._trust = trust
        self._every = every
        self._due = 0
        self._latest = 0
        self._given_up = threading.Event()
        self._working: threading.Thread | None = None
        self._done: Replay | None = None
        """Of the last one that was written, from there on."""
        for left in (log_path / SNAPSHOTS).glob(f"*{PARTIAL_SUFFIX}"):  # by one that died
            left.unlink(missing_ok=True)

    def recorded(self, generations: int) -> None:
        """Begin a snapshot if one is due.

        While the one before it is being written it waits, and gives way to a later one.
        """
        if not self._every:
            return
        if generations % self._every == 0 and generations > self._latest:
            self._due = self._latest = generations
        if self._working is None or not self._working.is_alive():
            self._begin()

    def finish(self) -> None:
        """Wait until all that is due is written."""
        while self._working is not None:
            self._working.join()
            self._working = None
            self._begin()

    def close(self) -> None:
        """Give up what is being written."""
        self._given_up.set()
        self._due = 0
        if self._working is not None:
            self._working.join()

    def _begin(self) -> None:
        if self._due:
            due, self._due = self._due, 0
            self._working = threading.Thread(
                target=self._write, args=(due,), name="snapshot", daemon=True
            )
            self._working.start()

    def _write(self, generation: int) -> None:
        from es_cookbook.runs.centre.replay import (
            open_replay,  # torch, which a Config does without
        )

        try:
            if self._done is not None:
                replay = self._done.later(generation)
            else:
                replay = open_replay(
                    self._log_path, generation, model_name=self._model_name, trust=self._trust
                )
            assert replay.fingerprint is not None, "a snapshot is of a generation that ended"
            path = write_snapshot(
                self._log_path,
                generation,
                replay.fingerprint,
                replay.space.shapes.items(),
                self._while_wanted(replay),
            )
            self._done = replay.from_snapshot(path)
        except CancelledError:
            pass
        except ESCookbookError as error:
            self._done = None
            _logger.warning("no snapshot of generation %d: %s", generation, error)

    def _while_wanted(self, replay: "Replay") -> "Generator[tuple[str, torch.Tensor]]":
        # One thread: the others' cores are sampling.
        for name, tensor in replay.centre_tensors(num_threads=1):
            if self._given_up.is_set():
                raise CancelledError
            yield name, tensor


def write_snapshot(
    log_path: Path,
    generation: int,
    fingerprint: int,
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    tensors: "Iterable[tuple[str, torch.Tensor]]",
) -> Path:
    """Write one, tensor by tensor, beside its final name, and rename it. Returns where it is.

    `tensors` are all that `shapes` names, in any order; one that raises leaves nothing behind.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    import torch

    from es_cookbook.checkpoints.snapshots import metadata
    from es_cookbook.checkpoints.tensors import TensorFile, TensorKind

    path = log_path / SNAPSHOTS / f"{generation:06d}{SNAPSHOT_SUFFIX}"
    beside = path.with_name(path.name + PARTIAL_SUFFIX)
    kinds: dict[str, TensorKind] = {name: (torch.float32, shape) for name, shape in shapes}
    try:
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        with TensorFile(beside, kinds, metadata(generation, fingerprint)) as file:
            for name, tensor in tensors:
                file.write(name, tensor)
        fsync(beside)
        beside.replace(path)
        fsync(path.parent)
        return path
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
