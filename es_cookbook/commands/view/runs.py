"""List the runs in a directory: where each stands, how far it is, and how good it was.

    python -m es_cookbook runs
    python -m es_cookbook runs runs/compare-countdown

All folders below are looked through, but not those of a run itself (`rewound/`, say). Runs are only
read, and may be in progress; the one that wrote last comes first.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import chz
from rich.cells import cell_len
from rich.text import Text

from es_cookbook.commands.view.texts import (
    STYLES,
    Screen,
    generations,
    kind,
    last_update,
    padded,
    shortened,
    shown_path,
    updated,
)
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.terminal import command, plural
from es_cookbook.runs.directory import CONFIG, HISTORY, METRICS
from es_cookbook.runs.reading import RunFiles, read_run
from es_cookbook.runs.report.naming import best_score

_NAMES = ("run", "state", "kind", "generation", "best held-out", "updated")
_SHORTEST = 16
"""Columns of a run's path; in a terminal that has not as many, the last of `_LEFT_OUT` go first."""
_LEFT_OUT = ("best held-out", "updated", "kind")


@chz.chz
class Runs:
    """List the runs in a directory and its folders, the one that wrote last first."""

    directory: str = chz.field(default="runs", doc="where to look", metadata=UNNAMED)


def found_in(directory: Path) -> Iterator[RunFiles]:
    """Every run in a directory and its folders, but for those within a run.

    Raises:
        RunDirectoryError: There is no such directory.
    """
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing there"
        raise RunDirectoryError(f"directory {directory} must be a directory, found {found}")
    for folder, inner, files in os.walk(directory):
        if not {CONFIG, HISTORY, METRICS}.intersection(files):
            continue
        try:
            yield read_run(Path(folder))
        except RunDirectoryError:  # A model, say.
            continue
        inner.clear()


def main(config: Runs) -> None:
    """Print the list."""
    directory, screen = Path(config.directory), Screen()
    runs = sorted(found_in(directory), key=lambda run: last_update(run.path), reverse=True)
    if not runs:
        print(f"no runs in {shown_path(directory)}")
        return
    columns = {
        name: [name, *cells]
        for name, cells in zip(_NAMES, zip(*map(_row, runs), strict=True), strict=True)
    }
    for text in _lines(columns, screen.width):
        screen.line(text)
    if damaged := [run for run in runs if run.problems]:
        screen.line(
            f"{plural(len(damaged), 'run')} could not be read in full; what is wrong: "
            f"{command('show')} log_path={shown_path(damaged[0].path)}"
        )


def _lines(columns: dict[str, list[str]], width: int | None) -> Iterator[Text]:
    """The columns beside each other; in a terminal, of so many columns at most."""
    widths = {name: max(map(cell_len, cells)) for name, cells in columns.items()}
    if width is not None:
        room = width - sum(widths[name] + 2 for name in _NAMES[1:])
        left_out = list(_LEFT_OUT)
        while room < _SHORTEST and left_out:
            room += widths.pop(left_out.pop()) + 2
        widths["run"] = min(widths["run"], max(room, _SHORTEST))
    for number in range(len(columns["run"])):
        text = Text(style="dim" if number == 0 else "")
        for name, wide in widths.items():
            cell = shortened(columns[name][number], wide)
            text.append(padded(cell, wide), STYLES.get(cell, "")).append("  ")
        yield text


def _row(run: RunFiles) -> tuple[str, ...]:
    score = best_score(run)
    return (
        shown_path(run.path),
        run.state,
        kind(run),
        generations(run),
        f"{score.value:.3f} {score.name}" if score else "-",
        updated(run.path),
    )


def cli() -> None:
    """The console entry point."""
    run_cli(main, Runs)
