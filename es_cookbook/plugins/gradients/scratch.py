"""Temporary folders that are removed even if the process that made them is killed.

A process holds a lock on its folder while it uses it. Before a folder is made, those whose lock is
free are removed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "es_cookbook-"
_MARK = "made by es_cookbook, which removes it"
"""The name of a file without which no folder is removed; other programs may use the prefix."""


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """Inside, an empty folder."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as made:
        folder = Path(made, "files")
        folder.mkdir()
        with FileLock(Path(made, "lock")):
            Path(made, _MARK).touch()  # Only now it may be removed, when the lock is free.
            yield folder


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, Timeout):
            is_own = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
            if is_own and (folder / _MARK).is_file():
                with FileLock(folder / "lock", timeout=0):
                    shutil.rmtree(folder)
