"""Snapshots of the centre, written from the history in a thread while the run continues.

Nothing depends on them: one that cannot be written is a warning, and one that was not finished when
the process died is missing. `es_cookbook.runs.centre.replay` checks which of them can be used, and
begins at the last one, so a snapshot adds only the steps since the one before it.
"""

import dataclasses
import logging
import threading
from collections.abc import Collection, Generator, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from es_cookbook.common.errors import ESCookbookError, RunDirectoryError
from es_cookbook.common.files import PARTIAL_SUFFIX
from es_cookbook.runs.directory.directory import SNAPSHOT_SUFFIX, SNAPSHOTS
from es_cookbook.runs.files import replacing
from es_cookbook.runs.tracking.base import Tracker

if TYPE_CHECKING:
    import torch

    from es_cookbook.runs.centre.replay import Replay

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class SnapshotWriter(Tracker):
    """Writes a snapshot every so many generations (none if 0), one at a time.

    Attributes:
        log_path: run directory.
        every: generations.
        model_name: name of the base; that of the run's Config if None.
        trust: needed to read that Config.
    """

    log_path: Path
    every: int
    model_name: str | None = None
    trust: Collection[str] = ()

    def __post_init__(self) -> None:
        self._due = 0
        self._given_up = threading.Event()
        self._writer = ThreadPoolExecutor(1, "snapshot")
        for left in (self.log_path / SNAPSHOTS).glob(f"*{PARTIAL_SUFFIX}"):  # By a killed process.
            left.unlink(missing_ok=True)

    def recorded(self, generations: int) -> None:
        """Begin a snapshot if one is due; while one is being written, the latest due one waits."""
        if self.every and generations % self.every == 0:
            self._due = generations
            self._writer.submit(self._write)

    def finish(self) -> None:
        """Wait until all that are due are written."""
        self._writer.shutdown()

    def close(self) -> None:
        """Give up the one that is being written."""
        self._given_up.set()
        self._writer.shutdown(cancel_futures=True)

    def _write(self) -> None:
        generation, self._due = self._due, 0
        if not generation:
            return  # A later one has been written in its place.
        from es_cookbook.runs.centre.replay import open_replay  # torch, not needed by a Config.

        try:
            replay = open_replay(
                self.log_path, generation, model_name=self.model_name, trust=self.trust
            )
            if replay.snapshot is not None and replay.snapshot.generation == generation:
                return  # Of the process before, or of the last generation, told twice.
            assert replay.fingerprint is not None, "a snapshot is of a generation that ended"
            shapes, tensors = replay.space.shapes.items(), self._while_wanted(replay)
            write_snapshot(self.log_path, generation, replay.fingerprint, shapes, tensors)
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
    kinds: dict[str, TensorKind] = {name: (torch.float32, shape) for name, shape in shapes}
    try:
        path.parent.mkdir(exist_ok=True)
        with (
            replacing(path) as beside,
            TensorFile(beside, kinds, metadata(generation, fingerprint)) as file,
        ):
            for name, tensor in tensors:
                file.write(name, tensor)
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
