"""What libraries print while a run goes on: kept in its `log.txt`, and off the screen.

transformers, datasets, huggingface_hub and others warn and log on stderr, by handlers that they
make when they are imported and keep. So while they are imported and load things, stderr is a stream
that leads into the log (`libraries_quiet`); later on it is the handlers that have it. What goes
through Python's own warnings and root logger is sorted by the file that it comes from: libraries'
is logged, and what es_cookbook or a script warns of stays on the screen, a line each.

Only in a command (`terminal.as_program`): a script that trains by itself has its own idea of all
this. Left out: progress bars, and what libraries in other languages print by themselves.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Generator
from io import TextIOBase
from pathlib import Path
from typing import TextIO, cast

from typing_extensions import override

from es_cookbook.common.files import appending
from es_cookbook.common.terminal import is_program, printable, screen, stderr_into

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("site-packages", "dist-packages")


class _Log(TextIOBase):
    """Stands in for stderr: leads into the log of the run that goes on, or to the screen if none.

    One object for all runs of a process, since libraries keep it.
    """

    def __init__(self) -> None:
        self.path: Path | None = None

    @override
    def write(self, text: str, /) -> int:
        if self.path is None:
            screen().write(text)
        elif not text.startswith("\r"):  # A progress bar draws itself, again and again.
            self.append(text)
        return len(text)

    def append(self, text: str) -> None:
        """Write to the log; a disk that refuses is no reason to end a run."""
        if self.path is not None:
            with contextlib.suppress(OSError), appending(self.path) as file:
                file.write(text)

    @override
    def fileno(self) -> int:
        return screen().fileno()


_log = _Log()


@contextlib.contextmanager
def library_log(path: Path) -> Generator[None]:
    """Inside, what libraries say is kept in this file, which is made when they say something."""
    if not is_program():
        yield
        return
    root, own = logging.getLogger(), logging.getLogger("es_cookbook")
    before = _log.path, warnings.showwarning
    level, handler = own.level, _Sorting()
    _log.path, warnings.showwarning = path, _show_warning
    if not root.handlers:  # Who has set up logging keeps it.
        root.addHandler(handler)
        own.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.path, warnings.showwarning = before
        root.removeHandler(handler)
        own.setLevel(level)


@contextlib.contextmanager
def libraries_quiet() -> Generator[None]:
    """Inside a `library_log`, what is printed on stderr goes there too."""
    if _log.path is None:
        yield
        return
    with stderr_into(cast(TextIO, _log)):
        yield


class _Sorting(logging.Handler):
    """Shows warnings that are es_cookbook's or a script's, and logs everything else."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or _is_library(record.pathname):
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            _log.append(f"{when} {record.name}: {self.format(record)}\n")
        else:
            with contextlib.suppress(OSError, ValueError):  # Closed; the run goes on.
                print(printable(self.format(record)), file=screen(), flush=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line)
    if file is None and _is_library(filename):
        _log.append(text)
    else:
        (file or screen()).write(text)


def _is_library(path: str) -> bool:
    return not path.startswith(_PACKAGE) and any(part in _LIBRARIES for part in Path(path).parts)
