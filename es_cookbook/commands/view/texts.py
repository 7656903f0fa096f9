"""What lists and summaries of runs in a terminal are made of.

Colours go to a terminal alone, and there lines fit its width; through a pipe they are plain text
and whole. Names and values come from files of strangers, so all of them go through `one_line`.
"""

import sys
import time
from pathlib import Path

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from es_cookbook.common.terminal import one_line
from es_cookbook.runs.directory import CONFIG, HISTORY, METRICS, ROLLOUTS
from es_cookbook.runs.reading import RunFiles

STYLES = {"running": "bold cyan", "complete": "green", "interrupted": "yellow", "not begun": "dim"}
"""State of a run -> how it is printed."""
_UNITS = (("day", 86_400), ("h", 3600), ("min", 60))


class Screen:
    """Prints lines to stdout as it is now.

    Attributes:
        width: columns of the terminal; None where there is none.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self.width = self._console.width if self._console.is_terminal else None

    def line(self, text: Text | str = "") -> None:
        """Print one line, which is neither wrapped nor cut here."""
        plain = Text(text) if isinstance(text, str) else text
        plain.rstrip()
        self._console.print(plain, soft_wrap=True)


def shortened(text: str, width: int) -> str:
    """A name in so many columns; of a longer one, its end.

    >>> shortened("runs/compare/es-seed0", 12)
    '…re/es-seed0'
    """
    if cell_len(text) <= width:
        return text
    kept = text[-max(width - 1, 1) :]
    while cell_len(kept) > max(width - 1, 1):
        kept = kept[1:]
    return f"…{kept}"


def begun_in(text: str, width: int) -> str:
    """A text in so many columns; of a longer one, its beginning.

    >>> begun_in("Put the numbers together", 12)
    'Put the num…'
    """
    return text if cell_len(text) <= width else f"{chop_cells(text, max(width - 1, 1))[0]}…"


def padded(text: str, width: int) -> str:
    """A text with spaces behind it, so many columns wide."""
    return text + " " * (width - cell_len(text))


def ago(seconds: float) -> str:
    """How long ago something was.

    >>> ago(5), ago(185), ago(7300), ago(90_000), ago(200_000)
    ('just now', '3 min ago', '2 h ago', '1 day ago', '2 days ago')
    """
    for unit, size in _UNITS:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"


def last_update(log_path: Path) -> float:
    """When a run last wrote something, in seconds of `time.time`; 0 where that is not known."""
    times = [0.0]
    for name in (HISTORY, METRICS, ROLLOUTS, CONFIG):
        try:
            times.append((log_path / name).stat().st_mtime)
        except OSError:  # Not there, or not readable: the others tell.
            continue
    return max(times)


def updated(log_path: Path) -> str:
    """The same, in words."""
    return ago(time.time() - last_update(log_path))


def kind(run: RunFiles) -> str:
    """By what it was trained."""
    return "gradient" if run.is_gradient else "ES"


def generations(run: RunFiles) -> str:
    """How far it is: generations that count, of all."""
    return f"{run.generations_done}/{run.num_generations or '?'}"


def shown_path(path: Path) -> str:
    """A path as text that a terminal shows and never obeys."""
    return one_line(str(path)).replace("\\\\", "\\")
