"""Snapshots of the centre, written from the history in a thread while the run continues.

Nothing depends on them: one that cannot be written is a warning, and one that was not finished when
the process died is missing. `es_cookbook.runs.centre.replay` checks which of them can be used, and
begins at the last one, so a snapshot adds only the steps since the one before it.
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

    Args:
        log_path: run directory.
        every: generations.
        model_name: name of the base; that of the run's Config if None.
        trust: needed to read that Config.
    """

    def __init__(
        self, log_path: Path, every: int, model_name: str | None = None, trust: Collection[str] = ()
    ) -> None:
        self._log_path = log_path
        self._model_name = model_name
        self._trust = trust
        self._every = every
        self._due = 0
        self._given_up = threading.Event()
        self._working: threading.Thread | None = None
        for left in (log_path / SNAPSHOTS).glob(f"*{PARTIAL_SUFFIX}"):  # By a killed process.
            left.unlink(missing_ok=True)

    def recorded(self, generations: int) -> None:
        """Begin a snapshot if one is due; while one is being written, the latest due one waits."""
        if self._every and generations % self._every == 0:
            self._due = generations
        if self._working is None or not self._working.is_alive():
            self._begin()

    def finish(self) -> None:
        """Wait until all that are due are written."""
        while self._working is not None:
            self._working.join()
            self._working = None
            self._begin()

    def close(self) -> None:
        """Give up the one that is being written."""
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
        from es_cookbook.runs.centre.replay import open_replay  # torch, not needed by a Config.

        try:
            replay = open_replay(
                self._log_path, generation, model_name=self._model_name, trust=self._trust
            )
            if replay.snapshot is not None and replay.snapshot.generation == generation:
                return  # Of the process before, or of the last generation, told twice.
            assert replay.fingerprint is not None, "a snapshot is of a generation that ended"
            shapes, tensors = replay.space.shapes.items(), self._while_wanted(replay)
            write_snapshot(self._log_path, generation, replay.fingerprint, shapes, tensors)
        except CancelledError:
            pass
        except ESCookbookError as error:
            _logger.warning("no snapshot of generation %d: %s", generation, error)

    def _while_wanted(self, replay: "Replay") -> "Generator[tuple[str, torch.Tensor]]":
        for name, tensor in replay.centre_tensors(num_threads=1):  # The other cores are sampling.
            if self._given_up.is_set():
                raise CancelledError
            yield name, tensor


def write_snapshot(
    log_path: Path,
    generation: int,
    fingerprint: int,
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    tensors: "Iterable[tuple[str, torch.Tensor]]",
) -> None:
    """Write a snapshot tensor by tensor, under a temporary name that is renamed at the end.

    `tensors` are those in `shapes`, in any order; if one raises, nothing is left behind.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    import torch

    from es_cookbook.checkpoints.tensors import TensorFile, TensorKind, metadata

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
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
