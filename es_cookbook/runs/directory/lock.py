"""The lock of a run directory: one process writes it at a time.

The lock is the operating system's (`flock` on the file `lock`), which releases it when the process
ends for any reason. The file holds the id of that process, and is deleted at a normal end. Where a
file system has no locks, a warning says so.
"""

import contextlib
import errno
import logging
import os
from pathlib import Path

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import opened_descriptor, read_file
from es_cookbook.runs.files import cannot

LOCK = "lock"
_LARGEST = 64
"""Bytes of the file."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

logger = logging.getLogger(__name__)


class RunLock:
    """The lock of a run directory, held from construction to `release`.

    Args:
        directory: must exist.

    Raises:
        RunDirectoryError: Another process holds it (names it), or it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        text = str(os.getpid()).encode()
        try:
            self._descriptor = self._locked(directory)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)
        except RunDirectoryError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise cannot("write", self._path, error, needed=len(text)) from error

    def _locked(self, directory: Path) -> int:
        while True:
            descriptor = opened_descriptor(self._path, os.O_RDWR | os.O_CREAT, directory)
            if not _flock(descriptor):
                pid = os.pread(descriptor, _LARGEST, 0).decode("ascii", "replace")
                os.close(descriptor)
                raise RunDirectoryError(
                    f"log_path {directory} is being written by process {pid or 'unknown'}; wait "
                    "until that run has ended, or stop it"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    return descriptor
            os.close(descriptor)  # Its owner has just deleted it.

    def release(self) -> None:
        """Release it; harmless if called twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def _flock(descriptor: int) -> bool:
    import filelock  # 40 ms, which every command would wait for.

    try:
        return filelock.lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("this file system has no locks: start no second run in the same directory")
        return True


def writer_of(directory: Path) -> str | None:
    """The process that writes a run directory, "process 123"; None if there is none."""
    try:
        pid = int(read_file(directory / LOCK, _LARGEST, directory))
    except (OSError, ValueError):
        return None
    import psutil  # 30 ms, which every command would wait for.

    return f"process {pid}" if psutil.pid_exists(pid) else None
