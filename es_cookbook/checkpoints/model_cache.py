"""Models that were made of something else, once: of a GGUF file, of a run's history.

Each is a model directory under a digest of what it was made of, so it is never out of date. It is
there whole or not at all, and two processes that come at once make it once.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import whole_directory

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
    if not directory.exists():
        from filelock import FileLock

        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(directory.with_suffix(".lock")):
                if not directory.exists():
                    with whole_directory(directory) as beside:
                        make(beside)
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


def _evict(keep: Path) -> None:
    """Delete the least recently used models until the others fit."""
    models = [path for path in keep.parent.iterdir() if path.is_dir() and path != keep]
    left = CACHE_SIZE
    for model in (keep, *sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)):
        left -= sum(file.stat().st_size for file in model.iterdir())
        if left < 0 and model != keep:
            shutil.rmtree(model, ignore_errors=True)
