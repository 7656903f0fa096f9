"""The page as one file: markup, style, script and data, with nothing to fetch.

The parts in `assets/` are put together unchanged. A content security policy allows only this
script, by its digest, and no requests, except to the server of a page that follows a run. Data are
gzip in base64, so that nothing in them can be taken for markup, and the script shows them as text.
"""

import base64
import contextlib
import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, lines, opened
from es_cookbook.common.terminal import plural, show_bytes
from es_cookbook.plugins.report.charted import page_data
from es_cookbook.plugins.report.rollouts import RolloutTable, compressed_json
from es_cookbook.runs.directory.directory import REPORT, ROLLOUTS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder
from es_cookbook.runs.tracking.reading import RunFiles, read_run

MOST_ROLLOUTS = 150_000
"""Rollouts on a page; if the runs have more, evenly spaced ones are shown."""
MEGABYTES = 5.0
"""Size of a page, unless its numbers alone are larger."""
_SHELL = 150_000
"""Bytes of a page that are not data."""
_SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "text.js",
    "data.js",
    "charts.js",
    "rollouts.js",
    "browser.js",
    "drawn.js",
    "words.js",
    "page.js",
)
_STYLES = ("uplot/uPlot.min.css", "page.css")

_logger = logging.getLogger(__name__)


def contents(
    log_paths: Sequence[Path], megabytes: float = MEGABYTES, *, are_complete: bool = False
) -> dict[str, bytes]:
    """Return the data of runs, `charts` and `rollouts`, as gzipped JSON.

    Args:
        log_paths: run directories.
        megabytes: size of a page with these contents; texts are cut accordingly.
        are_complete: whether the runs are complete, which their files may not show yet.

    Raises:
        RunDirectoryError: None of them is a run directory.
    """
    runs: list[RunFiles] = []
    unread: list[str] = []
    for path in log_paths:
        try:
            run = read_run(path)
        except RunDirectoryError as error:
            unread.append(str(error))
            continue
        runs.append(dataclasses.replace(run, state="complete") if are_complete else run)
    if not runs:
        raise RunDirectoryError(unread[0] if unread else "log_path must name a run, found none")
    table, notes = RolloutTable(), list[str]()
    for number, run in enumerate(runs):
        _add_rollouts(table, number, run, MOST_ROLLOUTS // len(runs), notes)
    drawn = page_data(runs)
    drawn |= {"unread": unread, "notes": notes, "rollouts": len(table)}
    charts = compressed_json(drawn)
    room = 3 * (1_000_000 * megabytes - _SHELL) / 4 - len(charts)  # Base64 is a third more.
    packed, cut_to = table.compressed(max(int(room), 200_000))
    if cut_to is not None:
        notes.append(
            f"Texts of more than {cut_to:,} characters are shown without their middle, so that the "
            "page stays small. The run directory has all of them, and a larger page more: "
            "es-cookbook report megabytes=…"
        )
        charts = compressed_json(drawn)
    return {"charts": charts, "rollouts": packed}


def _add_rollouts(
    table: RolloutTable, number: int, run: RunFiles, most: int, notes: list[str]
) -> None:
    path = run.path / ROLLOUTS
    step = max(1, math.ceil(_count_lines(path) / most))
    for rollout in islice(run.rollouts(notes.append), 0, None, step):
        table.add(number, rollout)
    if step > 1:
        notes.append(f"{path} has more than {plural(most, 'rollout')}; one in {step} is shown.")


def _count_lines(path: Path) -> int:
    with contextlib.suppress(OSError), opened(path, ANY_SIZE, path.parent) as file:
        return sum(1 for _ in lines(file))
    return 0


def write_report(
    log_paths: Sequence[Path],
    output: Path,
    megabytes: float = MEGABYTES,
    *,
    are_complete: bool = False,
) -> str:
    """Write a report of runs atomically; returns a sentence about it.

    Args:
        log_paths: run directories.
        output: the file.
        megabytes: maximum size of the file; texts of rollouts are cut accordingly.
        are_complete: as for `contents`.

    Raises:
        RunDirectoryError: No run can be read, or the file cannot be written.
    """
    chunks = list(page(contents(log_paths, megabytes, are_complete=are_complete)))
    replace_file(output, chunks)
    return f"{output}: {show_bytes(sum(map(len, chunks)))}"


@chz.chz
class ReportBuilder(TrackerBuilder):
    """Builds the tracker that writes `report.html` when a run is complete.

    For several runs, such as a sweep's, it writes a table, `results.parquet`, and at the end a
    report of all of them.
    """

    @override
    def summarise(
        self, log_path: Path, rows: Sequence[Mapping[str, object]], *, is_over: bool
    ) -> str:
        from es_cookbook.plugins.report.frames import table_of, write_table

        write_table(table_of(rows), log_path / "results.parquet")
        paths = [log_path / str(row["run"]) for row in rows if row["generations"]]
        if not (is_over and paths):
            return ""
        written = write_report(paths, log_path / REPORT)
        return f"their table is in {log_path / 'results.parquet'}, and all runs in {written}"

    def __call__(self, run: RunInfo) -> Tracker:
        return _ReportWriter(run.path)


class _ReportWriter(Tracker):
    """Writes the page from the run's files."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path

    @override
    def finish(self) -> None:
        """Write the page; a failure is only a warning, since the run is complete."""
        path = self._log_path
        try:
            write_report([path], path / REPORT, are_complete=True)
        except Exception as error:  # No failure here may end a run.
            _logger.warning("no %s: %s: %s", path / REPORT, type(error).__name__, error)


def page(data: Mapping[str, bytes], follow: str = "") -> Iterator[bytes]:
    """Yield the page in parts; with `follow`, the data's version, it asks for later ones."""
    script, style = _script(), "\n".join(map(_asset, _STYLES))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            *(["connect-src 'self'"] if follow else []),
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "policy": policy.encode(),
        "style": style.encode(),
        "follow": follow.encode(),
        "charts": base64.b64encode(data["charts"]),
        "rollouts": base64.b64encode(data["rollouts"]),
        "script": script.encode(),
    }
    for i, piece in enumerate(_asset("page.html").split("{{")):
        name, _, rest = piece.partition("}}") if i else ("", "", piece)
        if name:
            yield parts[name]
        yield rest.encode()


@cache
def _asset(name: str) -> str:
    path = files("es_cookbook.plugins.report").joinpath("assets", *name.split("/"))
    return path.read_text("utf-8")


@cache
def _script() -> str:
    """Return the library and one function with our scripts, which share a scope."""
    library, *own = map(_asset, _SCRIPTS)
    return "\n".join([library, '(() => {\n"use strict";', *own, "})();"])


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
