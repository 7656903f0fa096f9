"""The answers of one `generate`, in a file that survives a crash and is gone on with.

Its first line has the settings that shape an answer, every further one an answer under a key of its
own, on the disk as soon as it came. A last line that is torn is dropped. Answers of other settings
do not get into it: rows of one file come from one model asked in one way.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from es_cookbook.common.errors import ConfigError, DataError, RunDirectoryError
from es_cookbook.common.servers.chat import Completion
from es_cookbook.runs.files import LineFile, cannot


class AnswersFile:
    """Answers by key, those of earlier calls and those that are added.

    Args:
        path: made where it is not there.
        settings: what shapes an answer; of values that JSON has.

    Attributes:
        by_key: all answers.

    Raises:
        ConfigError: The file was begun with other settings; says which.
        DataError: It is none of ours, or damaged.
        RunDirectoryError: It cannot be written, or another process is doing so.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.by_key: dict[str, Completion] = {}
        self._path = path
        self._lock = _locked(path)  # First: the file remembers its size.
        self._file = LineFile(path)
        try:
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                self._file.truncate(len(whole))
            first, *others = whole.splitlines() or [b""]
            if others:
                self._check_settings(first, settings)
            else:  # Nothing was answered yet.
                self._file.truncate(0)
                self._file.append(_line({"settings": settings}))
            for number, line in enumerate(others, 2):
                key, answer = self._read(line, number)
                self.by_key[key] = answer
        except BaseException:
            self.close()
            raise

    def add(self, key: str, answer: Completion) -> None:
        """Keep an answer; it is on the disk afterwards.

        Raises:
            RunDirectoryError: The disk is full or failed.
        """
        self._file.append(
            _line({"key": key, "text": answer.text, "finish_reason": answer.finish_reason})
        )
        self.by_key[key] = answer

    def close(self) -> None:
        """Close the file, for others to go on with."""
        self._file.close()
        os.close(self._lock)

    def _check_settings(self, line: bytes, settings: Mapping[str, object]) -> None:
        before = self._object(line, 1).get("settings")
        if not isinstance(before, dict):
            raise self._damaged(1, "it has no settings")
        before = cast("dict[str, object]", before)
        differences = [
            f"{name}={before.get(name)!r:.60}, now {settings.get(name)!r:.60}"
            for name in sorted(before.keys() | settings.keys())
            if before.get(name) != settings.get(name)
        ]
        if differences:
            raise ConfigError(
                f"the answers in {self._path} were begun with {'; '.join(differences)}: give the "
                "same, or another output"
            )

    def _read(self, line: bytes, number: int) -> tuple[str, Completion]:
        found = self._object(line, number)
        key, text, finish_reason = (found.get(name) for name in ("key", "text", "finish_reason"))
        if not isinstance(key, str) or not isinstance(text, str):
            raise self._damaged(number, "it has no key and text")
        return key, Completion(text, finish_reason if isinstance(finish_reason, str) else None)

    def _object(self, line: bytes, number: int) -> dict[str, object]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(number, "it is not JSON") from None
        if not isinstance(found, dict):
            raise self._damaged(number, "it is no JSON object")
        return cast("dict[str, object]", found)

    def _damaged(self, number: int, why: str) -> DataError:
        return DataError(
            f"{self._path}, line {number}: no line of `generate` ({why}); give another output, or "
            "delete this file to begin again"
        )


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _locked(path: Path) -> int:
    """A descriptor that holds the file's lock."""
    import filelock

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cannot("write", path, error, needed=1) from error
    try:
        if filelock.lock_descriptor(descriptor, blocking=False):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        raise cannot("lock", path, error, needed=0) from error
    os.close(descriptor)
    raise RunDirectoryError(
        f"{path} is being written by another process; wait for its end, or stop it"
    )
