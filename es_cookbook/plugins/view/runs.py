"""List the runs in a directory: state, progress and best held-out result of each.

    python -m es_cookbook runs
    python -m es_cookbook runs runs/compare-countdown

All subdirectories are searched, except those of a run itself (such as `rewound/`). Runs are only
read and may be in progress; the most recently updated comes first.

In a terminal, lines are coloured and fit its width; through a pipe they are plain text and not
shortened. Names and values come from files of strangers, so all of them go through `one_line`.
"""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import chz
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.terminal import command, one_line, plural
from es_cookbook.runs.directory.directory import CONFIG, HISTORY, METRICS, ROLLOUTS, check_access
from es_cookbook.runs.tracking.jsonl import MEASURES
from es_cookbook.runs.tracking.reading import RunFiles, read_run

logger = logging.getLogger(__name__)

STYLES = {"running": "bold cyan", "complete": "green", "interrupted": "yellow", "not begun": "dim"}
"""State of a run -> how it is printed."""
_NAMES = ("run", "state", "kind", "generation", "best held-out", "updated")
_LABELS = dict(zip(MEASURES, ("correct", "reward", "training reward"), strict=True))
_SHORTEST = 16
"""Columns of a run's path in a narrow terminal."""


@chz.chz
class Runs:
    """List the runs in a directory and its subdirectories, most recently updated first."""

    directory: str = chz.field(default="runs", doc="directory to search", metadata=UNNAMED)


def found_in(directory: Path) -> Iterator[RunFiles]:
    """Yield every run in a directory and its folders, without runs inside a run.

    Runs of another version are skipped with a warning.

    Raises:
        RunDirectoryError: The directory does not exist.
    """
    check_access(directory)
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing there"
        raise RunDirectoryError(f"directory {directory} must be a directory, found {found}")
    for folder, inner, files in os.walk(directory):
        if not {CONFIG, HISTORY, METRICS}.intersection(files):
            continue
        try:
            yield read_run(Path(folder))
        except RunDirectoryError as error:
            if not {HISTORY, METRICS}.intersection(files):  # A model, say.
                continue
            logger.warning(one_line(str(error)))
        inner.clear()


def main(config: Runs) -> None:
    directory = Path(config.directory)
    runs = sorted(found_in(directory), key=lambda run: last_update(run.path), reverse=True)
    if not runs:
        print(f"no runs in {shown_path(directory)}")
        return
    columns = {
        name: [name, *cells]
        for name, cells in zip(_NAMES, zip(*map(_row, runs), strict=True), strict=True)
    }
    for text in _lines(columns, screen_width()):
        print_line(text)
    if damaged := [run for run in runs if run.problems]:
        print_line(
            f"{plural(len(damaged), 'run')} could not be read in full; what is wrong: "
            f"{command('show', log_path=shown_path(damaged[0].path))}"
        )


def _lines(columns: dict[str, list[str]], width: int | None) -> Iterator[Text]:
    """Yield the columns side by side, cut to the width of a terminal."""
    widths = {name: max(map(cell_len, cells)) for name, cells in columns.items()}
    if width is not None:
        room = width - sum(widths[name] + 2 for name in _NAMES[1:])
        widths["run"] = min(widths["run"], max(room, _SHORTEST))
    for number in range(len(columns["run"])):
        text = Text(style="dim" if number == 0 else "")
        for name, wide in widths.items():
            cell = shortened(columns[name][number], wide)
            text.append(set_cell_size(cell, wide), STYLES.get(cell, "")).append("  ")
        if width is not None:
            text.truncate(width)
        yield text


def _best_score(run: RunFiles) -> tuple[float, str] | None:
    """Return the highest value of the main metric of a run, and its label."""
    for key, label in _LABELS.items():
        values = [row[key] for row in run.metrics if math.isfinite(row.get(key, math.nan))]
        if values:
            return max(values), label
    return None


def _row(run: RunFiles) -> tuple[str, ...]:
    score = _best_score(run)
    return (
        shown_path(run.path),
        run.state,
        "gradient" if run.is_gradient else "ES",
        generations(run),
        "{:.3f} {}".format(*score) if score else "-",
        updated(run.path),
    )


def screen_width() -> int | None:
    """Return the width of the terminal; None if stdout is not one."""
    console = Console(file=sys.stdout)
    return console.width if console.is_terminal else None


def print_line(text: Text | str = "") -> None:
    """Print one line to stdout as it is now, neither wrapped nor cut."""
    plain = Text(text) if isinstance(text, str) else text
    plain.rstrip()
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        console.print(plain, soft_wrap=True)
    else:  # rich would exit where a pipe is closed.
        print(plain.plain)


def shortened(text: str, width: int) -> str:
    """Cut a name to a number of columns; the end of a longer name is kept.

    >>> shortened("runs/compare/es-seed0", 12)
    '…re/es-seed0'
    """
    if cell_len(text) <= width:
        return text
    kept = text[-max(width - 1, 1) :]
    while cell_len(kept) > max(width - 1, 1):
        kept = kept[1:]
    return f"…{kept}"


def last_update(log_path: Path) -> float:
    """Return the time at which a run last wrote something; 0 if unknown."""
    times = [0.0]
    for name in (HISTORY, METRICS, ROLLOUTS, CONFIG):
        with contextlib.suppress(OSError):  # Missing or not readable.
            times.append((log_path / name).stat().st_mtime)
    return max(times)


def updated(log_path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(last_update(log_path)))


def generations(run: RunFiles) -> str:
    """Return recorded and planned generations."""
    return f"{run.generations_done}/{run.num_generations or '?'}"


def shown_path(path: Path) -> str:
    """Return a path without control characters."""
    return one_line(str(path)).replace("\\\\", "\\")


def cli() -> None:
    run_cli(main, Runs)
