"""Output of vLLM's processes: not part of a run's output, but it says why they failed.

vLLM ends a request with "EngineCore encountered an issue. See stack trace (above)", or a start with
"See root cause above"; above, in the output of another process, are pages. Here the processes of an
engine print into a file; an error has the cause in its sentence and the rest in a note.
If VLLM_LOGGING_LEVEL is set, the user sees it.
"""

import logging
import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from es_cookbook.common.errors import EngineError

LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to it, except for 0."""
_LEVEL = "VLLM_LOGGING_LEVEL"
_LONGEST_LINE = 500
_MOST_LINES = 400
_STDOUT, _STDERR = 1, 2
_VLLMS_PREFIX = re.compile(r"^\([^()]*pid=\d+\) [A-Z]+ [-\d]+ [:\d]+ \[[^\]]*\] ?")
_SEE_ABOVE = re.compile(r"see .*(stack trace|root cause)", re.IGNORECASE)


class Output:
    """Output of the processes of one engine.

    Attributes:
        is_shown: shown to the user, at the level that the user has set, and not kept.
    """

    def __init__(self) -> None:
        self.is_shown = _LEVEL in os.environ
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._ignored = 0

    @contextmanager
    def kept(self) -> Generator[None]:
        """Redirect all output into the file; processes started inside write there until they end.

        This redirects this process's file descriptors, for all of its threads.
        """
        if self.is_shown:
            yield
            return
        before = [(fd, os.dup(fd)) for fd in (_STDOUT, _STDERR)]
        _flush()
        for fd, _ in before:
            os.dup2(self._file.fileno(), fd)
        os.environ[_LEVEL] = "WARNING"
        try:
            yield
        finally:
            os.environ.pop(_LEVEL, None)
            _flush()
            for fd, copy in before:
                os.dup2(copy, fd)
                os.close(copy)
            # In this process vLLM's errors are raised, too.
            logging.getLogger("vllm").setLevel(logging.CRITICAL)

    def started(self) -> None:
        """Ignore the output so far when explaining later failures."""
        self._ignored = os.fstat(self._file.fileno()).st_size

    def failure(self, what: str, error: Exception) -> EngineError:
        """Return vLLM's error as one sentence with its cause, noting all that was printed."""
        lines = [] if self._file.closed else self._lines(self._ignored)
        cause, said = _root_cause(lines), informative_line(error)
        if not self.is_shown and _SEE_ABOVE.search(cause or said):
            cause = "its process ended without a word, perhaps killed for its memory"
        failure = EngineError(f"{what}: {cause or said}")
        if any(lines):
            printed = "\n".join(line[:_LONGEST_LINE] for line in lines[-_MOST_LINES:])
            failure.add_note(f"vLLM's processes printed:\n{printed}")
        return failure

    def close(self) -> None:
        """Discard the output."""
        self._file.close()

    def _lines(self, start: int) -> list[str]:
        """Return the lines printed from this byte on."""
        file = self._file.fileno()
        data = os.pread(file, os.fstat(file).st_size - start, start)
        return [_VLLMS_PREFIX.sub("", line) for line in data.decode(errors="replace").split("\n")]


def _root_cause(lines: Iterable[str]) -> str | None:
    """Return the last line of the first traceback, "ValueError: …"; later ones are consequences."""
    remaining = iter(lines)
    for line in remaining:
        if line.startswith("Traceback (most recent call last)"):
            return next((line for line in remaining if line and not line.startswith(" ")), None)
    return None


def informative_line(error: Exception) -> str:
    """Return the first informative line; validation errors begin with a count."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if "validation error" not in line]
    return (informative or lines or [type(error).__name__])[0]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
