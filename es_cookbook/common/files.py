"""Atomically written files and directories, and untrusted files.

They are written beside the final name, fsynced and renamed.

A file from a stranger may be a pipe that blocks, a device without end, a link to a private file, or
a terabyte. So files of a run or model directory are opened by `opened` (or by `opened_descriptor`,
for appending): regular files of a limited size, and in a run directory without a link on the way.
Lines are read by `lines`, which limits their length.

Left out: a directory that somebody changes at the same moment.
"""

import json
import math
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from es_cookbook.common.errors import RunDirectoryError

LARGEST_CONFIG = 4 * 2**20
"""Bytes of a config; a recipe's has some thousands. Parsed, JSON takes up to 25 times as much."""
LARGEST_TEXT = 256 * 2**20
"""Bytes of a file that is read at once: a tokenizer, an evaluation, an index of weights."""
LONGEST_LINE = 16 * 2**20
"""Bytes of a line of metrics or rollouts."""
ANY_SIZE = 2**62
"""Limit for files that are read piece by piece: histories, rollouts, weights."""
MOST_VALUES = 2**21
"""Values in a JSON text, as `check_values` counts; as Python objects they take 100 MB."""
_SAFE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
PARTIAL_SUFFIX = ".partial"
"""Suffix of a file or directory that is being written; a leftover may be deleted."""


def fsync(path: Path) -> None:
    """Make a file's bytes durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(path: Path) -> Generator[Path]:
    """Yield a directory to fill; it gets its name at the end, or is deleted after a failure."""
    beside = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir()
        yield beside
        for file in (*beside.rglob("*"), beside):
            with suppress(OSError):  # safetensors makes files that nobody else may read.
                file.chmod(file.stat().st_mode | beside.stat().st_mode & 0o444)
            fsync(file)
        beside.rename(path)
        fsync(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def opened(path: Path, most: int, within: Path | None) -> BinaryIO:
    """Open a file for reading that a stranger may have made.

    Args:
        path: path of the file.
        most: most bytes that it may have.
        within: the run directory, below which no link is followed; None to follow links, as in
            paths that the user types and in models (the Hub's cache consists of links).

    Raises:
        FileNotFoundError: There is none.
        RunDirectoryError: Not a regular file, too large, or not readable; `strerror` has the reason
            alone.
    """
    try:
        file = open(path, "rb", opener=lambda _, flags: opened_descriptor(path, flags, within))  # noqa: SIM115 - returned
    except (FileNotFoundError, RunDirectoryError):
        raise
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from error
    if (size := os.fstat(file.fileno()).st_size) > most:
        file.close()
        raise _refusal(path, f"it has {size} bytes, and may have {most}")
    return file


def read_file(path: Path, most: int, within: Path | None) -> bytes:
    """Read a file, opened by `opened`; bytes that are appended meanwhile are left out."""
    with opened(path, most, within) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def check_file(path: Path, most: int, within: Path | None) -> Path:
    """Return the path, for a library that opens the file itself, if `opened` accepts it."""
    opened(path, most, within).close()
    return path


def appending(path: Path) -> TextIO:
    """Open a text file of a run for appending; it is created if it is missing.

    What UTF-8 cannot hold is written as in a Python string, as to stderr.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    descriptor = opened_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, path.parent)
    return os.fdopen(descriptor, "a", -1, "utf-8", "backslashreplace", newline="")


def opened_descriptor(path: Path, flags: int, within: Path | None) -> int:
    """Return a descriptor of a regular file, created if `flags` say so; links as in `opened`.

    Raises:
        RunDirectoryError: Something else is there.
        OSError: The operating system refuses.
    """
    if within is not None:
        for each in (path, *path.parents):
            if each == within:
                break
            if each.is_symlink():
                raise _refusal(each, "it is a link")
        flags |= _NO_LINK
    if path.exists() and not path.is_file():
        raise _refusal(path, "it must be a regular file, not a directory, pipe or device")
    return os.open(path, flags | _SAFE, 0o666)


def lines(file: BinaryIO, most: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yield the lines of a file.

    Raises:
        RunDirectoryError: One is longer than `most` bytes.
    """
    while line := file.readline(most):
        if len(line) == most and not line.endswith(b"\n"):
            raise RunDirectoryError(f"{file.name} has a line of more than {most} bytes")
        yield line


def parsed(text: bytes, most_values: int = MOST_VALUES) -> object:
    """Parse untrusted JSON, with limits on values and nesting.

    Raises:
        ValueError: It is invalid, or exceeds the limits.
    """
    check_values(text, most_values)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_values(text: bytes, most: int) -> None:
    """Refuse JSON that may hold more values than `most`.

    An object counts as four. Commas and brackets in strings count too, so this is an upper bound.

    Raises:
        ValueError: It may hold more.
    """
    if text.count(b",") + text.count(b"[") + 4 * text.count(b"{") > most:
        raise ValueError(f"it holds more than {most} values, or marks such as commas in its texts")


def strict_json(text: str, *, halves: bool = True) -> object:
    """Parse JSON as its standard has it: finite numbers, and no key twice in an object.

    Args:
        text: untrusted text.
        halves: strings may hold half a character, which JSON can write and UTF-8 cannot.

    Raises:
        ValueError: It is invalid; a clause that says why.
    """
    try:
        found = json.loads(
            text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_object
        )
        if not halves:
            check_characters(text, found)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos}") from error
    return found


def _finite(number: str) -> float:
    """Refuse NaN, Infinity, and 1e999, which Python reads as infinity."""
    if not math.isfinite(value := float(number)):
        raise ValueError(f"has a number that is not finite: {number:.60}")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a duplicate key, for which Python keeps the last value."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"has the key {key!r:.60} twice")
        found[key] = value
    return found


def check_characters(text: str, found: object) -> None:
    r"""Refuse a JSON text if its value `found` cannot be encoded in UTF-8.

    Raises:
        ValueError: A string holds half a character, as `\ud800` in the text.
    """
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"holds {half!r}, which is half a character") from error


def _refusal(path: Path, reason: str) -> RunDirectoryError:
    error = RunDirectoryError(f"{path} cannot be opened: {reason}")
    error.strerror = reason
    return error
