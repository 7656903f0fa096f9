"""Files that survive a crash: replaced whole, or grown by whole lines.

`replace_file` writes beside, fsyncs and renames, so a reader sees the old file or the new one.
`LineFile` appends a line and fsyncs it, so a line that was reported written is there after a power
cut; a crash in the middle leaves at most one torn line at the end, which every reader here leaves
out.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from es_cookbook.errors import RunDirectoryError

PARTIAL_SUFFIX = ".partial"
"""Ends the name of a file that is being written; whoever finds one may delete it."""


def fsync_directory(path: Path) -> None:
    """Make names that were created, renamed or deleted in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file beside its final name, fsync it and rename it.

    Raises:
        RunDirectoryError: It cannot be written; the old file, if any, still stands.
    """
    beside = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with beside.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error


class LineFile:
    """A file that grows by whole lines, each on the disk when `append` returns.

    Raises:
        RunDirectoryError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = os.fstat(self._descriptor).st_size
            fsync_directory(path.parent)
        except OSError as error:
            raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error

    def append(self, line: bytes) -> None:
        """Write one line, its newline included, and wait for the disk.

        Raises:
            RunDirectoryError: The disk is full or failed. The line does not count; it may be tried
                again.
        """
        try:
            # Whatever an append that failed half-way left behind goes first.
            os.ftruncate(self._descriptor, self._size)
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot append to {self._path}: {error.strerror or error}; "
                "everything before it is safe"
            ) from error
        self._size += len(line)

    def truncate(self, size: int) -> None:
        """Cut the file down to its first `size` bytes."""
        try:
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot repair {self._path}: {error.strerror or error}"
            ) from error
        self._size = size

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
