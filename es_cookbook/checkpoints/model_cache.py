"""Models that formats made of something else, once: of another program's file, of a run's history.

Each is a model directory under a digest of what it was made of, so it is never out of date. It is
there whole or not at all, and two processes that come at once make it once.

Beside it lies a manifest: the digest of every file, and size and times by which a file that has not
been touched is known without reading it. A file that has been touched is read and compared once. A
directory that is not what was made, or has no manifest, is made anew.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

from es_cookbook.common.errors import ModelError, RunDirectoryError
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file, whole_directory
from es_cookbook.common.terminal import say

Manifest: TypeAlias = Mapping[str, tuple[str, list[int]]]
"""Of each file the SHA-256, and what changes when somebody writes to it."""

CACHE = "ES_COOKBOOK_CACHE"
"""Environment variable: the directory of such models; by default in that of the Hub."""
CACHE_SIZE = 64 * 2**30
"""Bytes that are kept; the least recently used model goes first."""


def cached_model(what: str, digest: str, make: Callable[[Path], None]) -> Path:
    """The model directory of this digest, from the cache or made now.

    Args:
        what: it is made of, in words.
        digest: of all that it follows from.
        make: fills an empty directory with it.

    Raises:
        ModelError: The cache cannot be written; or as `make`.
    """
    directory = cache_directory() / "models" / digest
    if not _is_as_made(directory):
        from filelock import FileLock

        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(directory.with_suffix(".lock")):
                if not _is_as_made(directory):
                    _make(directory, make)
                    _evict(keep=directory)
        except OSError as error:
            raise ModelError(
                f"model_name: {what} cannot be converted into {directory.parent}: "
                f"{error.strerror or error}; {CACHE} may name another directory"
            ) from error
    with contextlib.suppress(OSError):  # Somebody else's cache, which may be read.
        os.utime(directory)
    return directory


def cache_directory() -> Path:
    """Where what was made once is kept: models, and what was measured of this machine."""
    from huggingface_hub import constants

    return Path(os.environ.get(CACHE) or Path(constants.HF_HOME) / "es_cookbook")


def _make(directory: Path, make: Callable[[Path], None]) -> None:
    if os.path.lexists(directory):
        say(f"{directory} is not what was converted, or was never checked: converting again")
    for path in (directory, _manifest(directory)):
        _remove(path)
    with whole_directory(directory) as beside:
        make(beside)
    made = {name: (digest_of(file), _state(file)) for name, file in _files(directory)}
    _write_manifest(directory, made)


def _remove(path: Path) -> None:
    """Remove what is in the way, of whatever kind; of a link not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_as_made(directory: Path) -> bool:
    """Whether a directory has the files of its manifest, of which only touched ones are read."""
    try:
        found = cast(
            "dict[Any, Any]",
            parsed(read_file(_manifest(directory), LARGEST_TEXT, directory.parent)),
        )
        made = {str(name): (str(digest), list(state)) for name, (digest, state) in found.items()}
        files = dict(_files(directory))
        if files.keys() != made.keys():
            return False
        touched = [name for name, file in files.items() if _state(file) != made[name][1]]
        if any(digest_of(files[name]) != made[name][0] for name in touched):
            return False
    except (
        OSError,
        RunDirectoryError,
        ValueError,
        TypeError,
        AttributeError,
    ):  # There is none, or it is damaged.
        return False
    if touched:
        with contextlib.suppress(OSError):  # Somebody else's cache, which may be read.
            now = {name: (made[name][0], _state(file)) for name, file in files.items()}
            _write_manifest(directory, now)
    return True


def _files(directory: Path) -> list[tuple[str, Path]]:
    files = sorted(path for path in directory.rglob("*") if not path.is_dir())
    return [(str(file.relative_to(directory)), file) for file in files]


def _state(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.json")


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    write_whole(_manifest(directory), json.dumps(manifest))


def write_whole(path: Path, text: str) -> None:
    """Write a small file of the cache, of which another process reads all or what was there."""
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _evict(keep: Path) -> None:
    """Delete the least recently used models until the others fit."""
    models = [path for path in keep.parent.iterdir() if path.is_dir() and path != keep]
    left = CACHE_SIZE
    for model in (keep, *sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)):
        left -= sum(file.stat().st_size for file in model.iterdir())
        if left < 0 and model != keep:
            shutil.rmtree(model, ignore_errors=True)
            _manifest(model).unlink(missing_ok=True)
