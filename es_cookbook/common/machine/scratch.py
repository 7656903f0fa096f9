"""Temporary folders that are removed even if the process that made them is killed.

All folders of a process lie in one, on which it holds a lock for as long as it lives. Before a
process makes its first one, it removes those of other processes whose lock is free.
"""

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "es_cookbook-"
_MARK = "made by es_cookbook, which removes it"
"""The name of a file without which no folder is removed; other programs may use the prefix."""
_own: dict[int, tuple[Path, FileLock]] = {}
"""Process -> its folder, and the lock on it; a forked process has another."""


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """Inside, an empty folder."""
    folder = Path(tempfile.mkdtemp(dir=_own_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_folder() -> Path:
    process = os.getpid()
    if process not in _own or not _own[process][0].is_dir():
        _remove_left()
        # It gets the name by which it is found when it is locked.
        beside = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        lock = FileLock(beside / "lock")
        lock.acquire()
        (beside / _MARK).touch()
        folder = beside.with_name(beside.name.removeprefix("."))
        beside.rename(folder)
        _own[process] = folder, lock
        atexit.register(_remove, process)
    return _own[process][0]


def _remove(process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(_own[process][0], ignore_errors=True)


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and (folder / _MARK).is_file():
                with FileLock(folder / "lock", timeout=0):
                    shutil.rmtree(folder)
