"""Files and directories that are there whole or not at all: made beside, synced, renamed."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

PARTIAL_SUFFIX = ".partial"
"""Ends the name of what is being written; whoever finds one may delete it."""


def fsync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_directory(path: Path) -> Generator[Path]:
    """A directory to fill, beside its final name: on the disk and renamed in the end, or gone."""
    beside = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        yield beside
        for file in (*beside.rglob("*"), beside):
            fsync(file)
        beside.rename(path)
        fsync(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
