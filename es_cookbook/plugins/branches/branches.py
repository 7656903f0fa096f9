"""Forks and rewinds: run directories that branch off at generation t.

A fork is a new directory that begins with the first t generations of another run, which is only
read. A rewind cuts a run back in place; the original goes to `rewound/<n>/`, which is a run
directory itself and can be forked. Both work on a history that is damaged after generation t, and
both are atomic: the fork is made under a temporary name and renamed, and a rewind cuts nothing
before the copy is on the disk.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from pathlib import Path

from es_cookbook.common.errors import HistoryError, RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, lines, opened, whole_directory
from es_cookbook.common.terminal import plural
from es_cookbook.runs.directory.directory import (
    CONFIG,
    FILES_OF_RUNS,
    GENERATION_KEYS,
    HISTORY,
    REPORT,
    REWOUND,
    SNAPSHOTS,
    WANDB_ID,
    Recorded,
    check_is_run,
    copy_trained_on,
    cut_lines,
    lines_before,
    locked,
    num_rewinds,
)
from es_cookbook.runs.directory.opening import refuse_lost_history
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.history.format import Fork
from es_cookbook.runs.history.store import first_generations


def fork_run(
    source: Path,
    generation: int | None,
    output: Path,
    config_json: str,
    found: Mapping[str, float],
) -> int:
    """Make a run directory that begins with the first generations of another run.

    Takes all recorded generations if `generation` is None. `source` is only read and may be in
    progress. `config_json` comes from the user of this process, and `found` has values for those of
    its optimizer's options that are `auto`.

    Returns:
        The number of generations taken.

    Raises:
        RunDirectoryError: `output` is not new or empty, or cannot be written.
        HistoryError: Fewer generations are recorded, or they cannot be read.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunDirectoryError(f"output must be a new or empty directory, found {output}")
    recorded = Recorded(source)
    refuse_lost_history(recorded)
    prefix = first_generations(recorded.history, source / HISTORY, generation)
    taken = prefix.generations
    fork = Fork(str(source), taken)
    header = prefix.header and dataclasses.replace(prefix.header, fork=fork, found=found)
    forked = dataclasses.replace(prefix, header=header)
    with _new_directory(output) as beside:
        replace_file(beside / CONFIG, [config_json.encode()])
        replace_file(beside / HISTORY, forked.encode())
        for name in GENERATION_KEYS:
            if (source / name).exists():
                replace_file(beside / name, lines_before(source / name, taken))
        if taken:
            copy_trained_on(source, beside)
    return taken


def rewind_run(log_path: Path, generation: int) -> Path:
    """Cut a run back to its first generations.

    Returns:
        The directory of the original run.

    Raises:
        RunDirectoryError: There is no run, it is in progress, or the disk failed; nothing is cut.
        HistoryError: Fewer generations are recorded, or there is nothing to cut.
    """
    check_is_run(log_path)
    with locked(log_path) as recorded:
        refuse_lost_history(recorded)
        kept = first_generations(recorded.history, log_path / HISTORY, generation)
        if kept.header is not None and (fork := kept.header.fork) is not None:
            fork = dataclasses.replace(fork, generation=min(fork.generation, generation))
            kept = dataclasses.replace(kept, header=dataclasses.replace(kept.header, fork=fork))
        cut = b"".join(kept.encode())
        history = log_path / HISTORY
        is_all = not history.exists() or history.stat().st_size <= len(cut)
        if is_all and recorded.num_measured <= generation + 1:
            raise HistoryError(
                f"log_path {log_path} holds {plural(generation, 'generation')} and no more: there "
                "is nothing to cut"
            )
        rewound = _set_aside(log_path)
        _move_snapshots(log_path, generation, rewound)
        if (log_path / REPORT).is_file():  # It shows what is cut off.
            (log_path / REPORT).rename(rewound / REPORT)
        replace_file(log_path / HISTORY, [cut])
        for name in GENERATION_KEYS:
            cut_lines(log_path / name, generation)
    return rewound


def _set_aside(log_path: Path) -> Path:
    """Copy a run to `rewound/<n>/`, a run directory itself; returns its path.

    Snapshots are large, so they are not copied. The run in W&B belongs to the copy from now on.

    Raises:
        RunDirectoryError: The copy cannot be written; nothing is left of it.
    """
    rewound = log_path / REWOUND / str(num_rewinds(log_path) + 1)
    with _new_directory(rewound) as beside:
        for name in FILES_OF_RUNS:
            if (log_path / name).exists():
                with opened(log_path / name, ANY_SIZE, log_path) as file:
                    replace_file(beside / name, lines(file))
        copy_trained_on(log_path, beside)
    if (log_path / WANDB_ID).is_file():  # W&B's run has what is cut off.
        (log_path / WANDB_ID).rename(rewound / WANDB_ID)
    return rewound


@contextlib.contextmanager
def _new_directory(path: Path) -> Generator[Path]:
    """Yield a run directory to fill, which is created atomically; failures become sentences."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(path) as beside:
            yield beside
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise cannot("make", path, error, needed=4096) from error


def _move_snapshots(log_path: Path, generation: int, rewound: Path) -> None:
    """Move snapshots of generations that are cut off; they are too large to copy."""
    later = [
        path
        for path in (log_path / SNAPSHOTS).glob("*")
        if path.stem.isdecimal() and int(path.stem) > generation
    ]
    if later:
        (rewound / SNAPSHOTS).mkdir()
    for path in later:
        path.rename(rewound / SNAPSHOTS / path.name)
