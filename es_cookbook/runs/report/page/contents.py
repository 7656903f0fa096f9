"""What a report holds: the data of its charts and those of its rollouts, from run directories."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, opened
from es_cookbook.common.terminal import plural
from es_cookbook.runs.directory import ROLLOUTS
from es_cookbook.runs.reading import RunFiles, State, read_run
from es_cookbook.runs.report.page.charted import page_data
from es_cookbook.runs.report.page.rollouts import RolloutTable, compressed_json

MOST_ROLLOUTS = 150_000
"""Of all runs of a page together; of more, evenly spaced ones are on it."""
MEGABYTES = 5.0
"""Of a page, unless its numbers alone are more."""
_SHELL = 150_000
"""Bytes of a page that are not data."""


def contents(
    log_paths: Sequence[Path],
    states: Mapping[Path, State] | None = None,
    megabytes: float = MEGABYTES,
) -> dict[str, bytes]:
    """Read runs; what cannot be read of one is said on the page.

    `charts` and `rollouts` as gzipped JSON; the former are drawn while the latter are unpacked.

    Args:
        log_paths: run directories.
        states: where a run stands, if its files do not say it yet.
        megabytes: of a page with these contents; texts are cut as far as that takes.

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
        runs.append(dataclasses.replace(run, state=(states or {}).get(path, run.state)))
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
            f"Texts of more than {cut_to:,} characters are without their middle, and say "
            "what is missing, so that the page stays small. The run directory has all of them, and "
            "a larger page more: es-cookbook report megabytes=…"
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
    count = 0
    with contextlib.suppress(OSError), opened(path, ANY_SIZE, path.parent) as file:
        while chunk := file.read(1 << 20):
            count += chunk.count(b"\n")
    return count
