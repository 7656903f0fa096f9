"""Snapshots in the run directory: found, checked, written.

A snapshot only saves time, so one that cannot be trusted is left out with a warning: its generation
and, by the fingerprint, every bit of it have to be those of the history's centre. One of another
run, or of generations that were since run again another way, is not.
"""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from es_cookbook.checkpoints.snapshots import Snapshot, metadata, read_snapshot
from es_cookbook.checkpoints.tensors import TensorFile, TensorKind
from es_cookbook.common.errors import HistoryError, RunDirectoryError
from es_cookbook.common.files import PARTIAL_SUFFIX, fsync
from es_cookbook.runs.directory import SNAPSHOTS
from es_cookbook.runs.history.format import Header

_SUFFIX = ".safetensors"

_logger = logging.getLogger(__name__)


def latest_snapshot(
    log_path: Path, fingerprints: Sequence[int], header: Header | None
) -> Snapshot | None:
    """The last one that can be used, or None; one that cannot is named in a warning.

    Args:
        log_path: run directory.
        fingerprints: `[t]`, of the centre after t + 1 generations, as the history has them; later
            snapshots are not looked at.
        header: of the history. Where it does not say which base the run began with, none is used:
            only a whole replay then shows whether this is that base.
    """
    if header is None or header.weights is None:
        return None
    for path in sorted((log_path / SNAPSHOTS).glob(f"*{_SUFFIX}"), reverse=True):
        number = path.name.removesuffix(_SUFFIX)
        if not number.isdecimal() or not 0 < int(number) <= len(fingerprints):
            continue
        try:
            snapshot = read_snapshot(path)
            if snapshot.generation != int(number):
                raise HistoryError(f"{path} says that it is of generation {snapshot.generation}")
            recorded = fingerprints[snapshot.generation - 1]
            if snapshot.fingerprint != recorded:
                raise HistoryError(
                    f"{path} has fingerprint {snapshot.fingerprint:016x} where the history has "
                    f"{recorded:016x}: it is another run's"
                )
            if not snapshot.holds_what_it_says():
                raise HistoryError(f"{path} is damaged: its weights have another fingerprint")
        except HistoryError as error:
            _logger.warning("%s; it is not used", error)
        else:
            return snapshot
    return None


def write_snapshot(
    log_path: Path,
    generation: int,
    fingerprint: int,
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Path:
    """Write one, tensor by tensor, beside its final name, and rename it. Returns where it is.

    `tensors` are all that `shapes` names, in any order; one that raises leaves nothing behind.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    path = log_path / SNAPSHOTS / f"{generation:06d}{_SUFFIX}"
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
