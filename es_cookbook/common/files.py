"""Files and directories that are there whole or not at all, and files that strangers made.

What is written is made beside its final name, synced and renamed.

What is read may be anything: a pipe, which is waited for, a device without end, a link to a file of
somebody else, a file of terabytes that takes no room on the disk. So whatever comes from a run
directory or a model directory is opened by `opened` (or by `opened_descriptor`, for appending): a
regular file, of a stated size at most, and, in a run directory, with no link on the way. Lines are
read by `lines`, of a stated length at most.

Left out: a directory that somebody else changes at that very moment.
"""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from es_cookbook.common.errors import RunDirectoryError

LARGEST_CONFIG = 4 * 2**20
"""Bytes of a config; a recipe's has some thousands. Parsed, JSON takes up to 25 times as much."""
LARGEST_TEXT = 256 * 2**20
"""Bytes of a file that is read at once: a tokenizer, an evaluation, an index of weights."""
LONGEST_LINE = 16 * 2**20
"""Bytes of a line of a history, metrics or rollouts: a million scores."""
ANY_SIZE = 2**62
"""For what is read piece by piece: histories, rollouts, weights."""
MOST_VALUES = 2**21
"""Of a text in JSON, an object counted as four; as Python's objects they take 100 MB."""
_HOLES = 64 * 2**20
"""Bytes of a file that need not be on the disk: a crash may leave some behind the last line."""
_SAFE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}

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
        _unfinished.add(beside)
        yield beside
        for file in (*beside.rglob("*"), beside):
            fsync(file)
        beside.rename(path)
        fsync(path.parent)
    finally:
        _unfinished.discard(beside)
        shutil.rmtree(beside, ignore_errors=True)


_unfinished: set[Path] = set()
"""Directories that are being filled."""


def remove_unfinished() -> None:
    """Delete what is being filled, as the process ends while other threads still write there.

    None of it can get its final name any more: that would be the name of a part of it.
    """
    for beside in list(_unfinished):
        gone = beside.with_name(f"{beside.name}{PARTIAL_SUFFIX}")
        with contextlib.suppress(OSError):  # It has just been finished.
            beside.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def opened(path: Path, most: int, within: Path | None) -> BinaryIO:
    """Open a file for reading that a stranger may have made.

    Args:
        path: of the file.
        most: bytes that it may have.
        within: the directory from which on no link is followed, that of the run; None where links
            are followed, as in what the user names and in a model: the Hub's cache is made of them.

    Raises:
        FileNotFoundError: There is none.
        RunDirectoryError: It is no regular file, too large, or cannot be read; `strerror` has the
            reason alone.
    """
    try:
        descriptor = opened_descriptor(path, os.O_RDONLY, within)
    except OSError as error:
        if isinstance(error, FileNotFoundError | RunDirectoryError):
            raise
        raise _refusal(path, error.strerror or str(error)) from error
    try:
        _check_size(path, descriptor, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most: int, within: Path | None) -> bytes:
    """All of a file, as `opened` opens it; no more of one that grows meanwhile."""
    with opened(path, most, within) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def check_file(path: Path, most: int, within: Path | None) -> Path:
    """The path itself, for a library that opens it, if `opened` would."""
    opened(path, most, within).close()
    return path


def appending(path: Path) -> TextIO:
    """Open a file of text of a run for appending; it is made where there is none.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    descriptor = opened_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, path.parent)
    return os.fdopen(descriptor, "a", encoding="utf-8", newline="")


def opened_descriptor(path: Path, flags: int, within: Path | None) -> int:
    """A descriptor of a regular file, new where `flags` make one; links as in `opened`.

    Raises:
        RunDirectoryError: It is something else.
        OSError: The operating system refuses.
    """
    if within is not None:
        check_folder(path.parent, within)
    with contextlib.suppress(FileNotFoundError):  # Opening a device may do something already.
        _check_kind(path, path.stat(follow_symlinks=within is None).st_mode)
    descriptor = os.open(path, flags | _SAFE | (0 if within is None else _NO_LINK), 0o666)
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_folder(folder: Path, within: Path) -> None:
    """Refuse a folder of a directory that is a link, or that a link leads to.

    Raises:
        RunDirectoryError: It is so.
    """
    for each in (folder, *folder.parents):
        if each == within:
            return
        if each.is_symlink():
            raise _refusal(each, "it is a link, and must be a directory")


def lines(file: BinaryIO, most: int = LONGEST_LINE) -> Iterator[bytes]:
    """The lines of a file; one that is longer than `most` bytes comes in pieces without an end."""
    while line := file.readline(most):
        yield line


def parsed(text: bytes, most_values: int = MOST_VALUES) -> object:
    """JSON of strangers, which takes neither the memory nor the stack.

    Raises:
        ValueError: It is no JSON, or more than that; says what.
    """
    check_values(text, most_values)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_values(text: bytes, most: int) -> None:
    """Raises ValueError if a text in JSON holds more values, an object counted as four.

    Of a longer text than any line, what is in strings may count too.
    """
    if len(text) <= most or _marks(text) <= most:
        return
    if len(text) > LONGEST_LINE or num_values(text, most) > most:
        raise ValueError(f"it holds more than {most} values")


def num_values(text: bytes, most: int) -> int:
    """How many values JSON has outside strings, an object counted as four.

    Counted no further than `most`; text with more strings than so many values have is none.
    """
    found = end = 0
    for number, string in enumerate(_STRING.finditer(text)):
        found += _marks(text, end, string.start())
        end = string.end()
        if found > most or number > 2 * most + 1:
            return most + 1
    return found + _marks(text, end)


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def _marks(text: bytes, start: int = 0, end: int | None = None) -> int:
    commas, arrays, objects = (text.count(each, start, end) for each in (b",", b"[", b"{"))
    return commas + arrays + 4 * objects


def strict_json(text: str, *, halves: bool = True) -> object:
    """JSON as its standard has it: with numbers that are finite, and no key twice in an object.

    Args:
        text: of strangers.
        halves: strings may hold half a character, which JSON can write and UTF-8 cannot.

    Raises:
        ValueError: It is something else; a half-sentence that says of it what is wrong.
    """
    try:
        found = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, object_pairs_hook=_object
        )
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:
        if "digits" not in str(error):
            raise
        raise ValueError("has a number with too many digits") from error
    try:
        return found if halves else in_whole_characters(text, found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"holds {error}") from error


def _no_number(name: str) -> None:
    raise ValueError(f"is damaged: {name} is no JSON")


def _finite(number: str) -> float:
    """JSON's 1e999 would be read as infinity, which nobody means."""
    if not math.isfinite(value := float(number)):
        raise ValueError("has a number that is too large")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"has the key {key!r:.60} twice")
    return found


def in_whole_characters(text: str, found: object) -> object:
    r"""What was found in a JSON text; it can be written again.

    Raises:
        ValueError: A string holds half a character, as `\ud800` in the text.
    """
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{half!r}, which is half a character") from error
    return found


def kind_of(path: Path) -> str | None:
    """What is there: "a regular file", "a directory", "a link", "a pipe"; None for nothing."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    return _name_of(mode)


def _name_of(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _refusal(path, f"it is {_name_of(mode)}, and must be a regular file")


def _check_size(path: Path, descriptor: int, most: int) -> None:
    found = os.fstat(descriptor)
    if found.st_size > most:
        raise _refusal(path, f"it has {found.st_size} bytes, and may have {most}")
    # A file system that compresses has few blocks without a hole.
    on_disk = 512 * getattr(found, "st_blocks", found.st_size)
    if found.st_size - on_disk > _HOLES and _has_hole(descriptor, found.st_size):
        raise _refusal(
            path, f"it is sparse: of its {found.st_size} bytes {on_disk} are on the disk"
        )


def _has_hole(descriptor: int, size: int) -> bool:
    if not hasattr(os, "SEEK_HOLE"):
        return False
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    except OSError as error:
        return error.errno == errno.ENXIO
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def _refusal(path: Path, reason: str) -> RunDirectoryError:
    error = RunDirectoryError(f"{path} cannot be opened: {reason}")
    error.strerror = reason
    return error
