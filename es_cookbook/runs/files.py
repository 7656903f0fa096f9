"""Files that survive a crash: replaced atomically, or appended to line by line.

`replace_file` writes a temporary file, fsyncs and renames it, so a reader sees the old file or the
new one. `LineFile` appends a line and fsyncs it, so a line that was reported written is there after
a power cut; a crash in the middle leaves at most one torn line at the end, which every reader here
ignores. If the disk refuses, the error has advice, and earlier content is kept.
"""

import contextlib
import errno
import os
from collections.abc import Generator, Iterable
from pathlib import Path

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import PARTIAL_SUFFIX, fsync, opened_descriptor


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under a temporary name, fsync it and rename it.

    Raises:
        RunDirectoryError: It cannot be written; the old file, if any, is unchanged.
    """
    needed, remaining = 0, iter(chunks)
    try:
        with replacing(path) as beside, beside.open("xb") as file:
            for chunk in remaining:
                needed += len(chunk)
                file.write(chunk)
    except OSError as error:
        needed += sum(map(len, remaining))
        raise cannot("write", path, error, needed) from error


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield the temporary name of a new file, which is renamed to `path` unless the block fails."""
    beside = path.with_name(path.name + PARTIAL_SUFFIX)
    beside.unlink(missing_ok=True)  # Left behind, or a link to somewhere else.
    try:
        yield beside
        fsync(beside)
        beside.replace(path)
        fsync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def cannot(do: str, path: Path, error: OSError, needed: int) -> RunDirectoryError:
    """Return the error of a refused write: which file, why, and what to do about it.

    >>> print(cannot("write", Path("runs/a/config.json"), OSError(errno.ENOSPC, "No space"), 812))
    cannot write runs/a/config.json: No space; free at least 812 bytes on the disk of runs/a

    `needed` is the number of bytes that were to be written.
    """
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            advice = f"; free at least {needed} bytes on the disk of {path.parent}"
        case errno.EFBIG:
            advice = f"; raise the limit on a file's size (ulimit -f) by at least {needed} bytes"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            advice = f"; make {path.parent} writable"
        case _:
            advice = ""
    return RunDirectoryError(f"cannot {do} {path}: {error.strerror or error}{advice}")


class LineFile:
    """A file of lines; each is on the disk when `append` returns.

    Raises:
        RunDirectoryError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = opened_descriptor(path, flags, path.parent)
            self._size = os.fstat(self._descriptor).st_size
            fsync(path.parent)
        except OSError as error:
            raise cannot("write", path, error, needed=1) from error

    def append(self, line: bytes) -> None:
        """Write one line, its newline included, and wait for the disk.

        Raises:
            RunDirectoryError: The disk is full or failed. The line does not count; it may be
                retried.
        """
        try:
            # Remove what an earlier failed append may have left.
            os.ftruncate(self._descriptor, self._size)
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
            if not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was deleted while the run went on")
        except OSError as error:
            with contextlib.suppress(OSError):  # Half a line; if this fails, opening drops it.
                os.ftruncate(self._descriptor, self._size)
            refusal = cannot("append to", self._path, error, len(line))
            if error.errno == errno.ENOENT:
                raise refusal from error
            raise RunDirectoryError(f"{refusal}; everything before it is safe") from error
        self._size += len(line)

    def truncate(self, size: int) -> int:
        """Cut the file to its first `size` bytes; returns how many bytes were cut."""
        cut = self._size - size
        if cut:
            try:
                os.ftruncate(self._descriptor, size)
                os.fsync(self._descriptor)
            except OSError as error:
                raise cannot("repair", self._path, error, needed=1) from error
            self._size = size
        return cut

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
