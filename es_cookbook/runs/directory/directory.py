"""The run directory: one directory per run.

The history says which generations count. Each generation is written to `metrics.jsonl` and
`rollouts.jsonl` first and to `history.jsonl` last, each fsynced, so every recorded generation has
its metrics. When a run continues, lines of generations that the history does not have are cut from
both files; those generations are run again and written again, so the files end up like those of an
unbroken run.

The directory is locked first (`locked`). Then its files are read once, into a `Recorded` that is
handed on. `opening` decides what happens to the recorded run.
"""

import contextlib
import errno
import functools
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

from es_cookbook.common.configs import FORMAT, FORMAT_VERSION, text_of
from es_cookbook.common.errors import (
    ConfigError,
    EngineError,
    HistoryError,
    RunDirectoryError,
    leaves,
    other_format,
)
from es_cookbook.common.files import (
    ANY_SIZE,
    PARTIAL_SUFFIX,
    appending,
    lines,
    opened,
    opened_descriptor,
    parsed,
    read_file,
)
from es_cookbook.common.terminal import plural
from es_cookbook.rl.problem_env import TrainedOn
from es_cookbook.rl.types import Datasets
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.history.store import Prefix, readable_prefix

CONFIG = "config.json"
HISTORY = "history.jsonl"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
LOCK = "lock"
SNAPSHOTS = "snapshots"
SNAPSHOT_SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""Model or adapter directory of a checkpoint."""
REWOUND = "rewound"
LOG = "log.txt"
LOSSES = "losses.csv"
PROFILE = "profile.json"
TENSORBOARD = "tensorboard"
REPORT = "report.html"
WANDB_ID = "wandb_id"
TRAINED_ON = "trained_on.bin"
FILES_OF_RUNS = (CONFIG, HISTORY, METRICS, ROLLOUTS)
"""The files that a run consists of; all others are derived from them or optional."""
_MISSING = "is missing"
NOT_A_RUN = "does not describe a run (models have a file of this name, too)"
"""The problem with a `config.json` of something else than a run."""
GENERATION_KEYS = {METRICS: "progress/generation", ROLLOUTS: "generation"}
"""Files with lines for every generation -> the key of the generation in a line."""
WRITTEN_BY_RUNS = frozenset(
    {
        *(CONFIG, HISTORY, METRICS, ROLLOUTS, LOCK, SNAPSHOTS, REWOUND, CHECKPOINTS),
        *(LOSSES, PROFILE, REPORT, TENSORBOARD, TRAINED_ON),
        *("optimizer", "wandb", WANDB_ID),
        "date.txt",  # Of earlier versions.
    }
)
"""Names that may be in a run directory; anything else is the user's."""
_FOLDERS = {SNAPSHOTS, REWOUND, CHECKPOINTS, TENSORBOARD, "optimizer", "wandb"}
_LARGEST = 1e300
"""Largest number in metrics, so that sums are finite; Python's integers are unbounded."""
_MOST_TRAINED_ON = 2**28
"""Bytes of `trained_on.bin`; ten million problems have fewer."""
_MOST_LOCK = 64
"""Bytes of the lock file."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

_Row = TypeVar("_Row")

logger = logging.getLogger(__name__)


class Recorded:
    """The contents of a run directory. Each file is read once, when it is first needed."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path

    @functools.cached_property
    def config_json(self) -> str:
        """The run's Config.

        Raises:
            ConfigError: It cannot be read.
        """
        return text_of(self.log_path / CONFIG)

    @functools.cached_property
    def history(self) -> Prefix:
        """The run's history, as far as it can be read."""
        return readable_prefix(self.log_path / HISTORY)

    @functools.cached_property
    def metrics(self) -> Sequence[dict[str, float]]:
        """The rows of `metrics.jsonl`; raises the errors of `read_metrics`."""
        return read_metrics(self.log_path / METRICS)

    @functools.cached_property
    def num_measured(self) -> int:
        """Number of generations with metrics; the last evaluation counts as one.

        Raises:
            HistoryError: As `read_metrics`.
        """
        key = GENERATION_KEYS[METRICS]
        found = [row[key] for row in self.metrics if math.isfinite(row.get(key, math.nan))]
        return int(max(found, default=-1)) + 1

    @functools.cached_property
    def fields(self) -> tuple[dict[str, object], str]:
        """The Config as JSON values; nothing that it names is imported.

        Its fields and "", or nothing and the problem with the file.

        Raises:
            RunDirectoryError: It is a run's, in another version of the format.
        """
        path = self.log_path / CONFIG
        if not os.path.lexists(path):
            return {}, _MISSING
        try:
            plain = parsed(self.config_json.encode())
        except ConfigError as error:
            return {}, str(error).removeprefix(f"{path} ")
        except ValueError as error:
            return {}, f"cannot be read ({error})"
        if not (isinstance(plain, dict) and "$class" in plain):
            return {}, NOT_A_RUN
        fields = cast("dict[str, object]", plain)
        if (version := fields.pop(FORMAT, None)) != FORMAT_VERSION:
            raise RunDirectoryError(f"{path}: {other_format(version, FORMAT_VERSION)}")
        return fields, ""


def check_is_run(log_path: Path, or_of_gradients: bool = False) -> Recorded:
    """Returns the contents of a run directory; its `config.json` may be damaged.

    Raises:
        RunDirectoryError: It is not a run's, cannot be read, or is of another version.
    """
    recorded = Recorded(log_path)
    if is_of_gradients(log_path) and not or_of_gradients:
        raise RunDirectoryError(
            f"log_path {log_path} holds a run of gradients, which has no history, so only "
            f"evaluate reads it; its weights are a model: model_name={log_path}"
        )
    check_access(log_path)
    check_kinds(log_path)
    if (problem := recorded.fields[1]) in (_MISSING, NOT_A_RUN):
        raise RunDirectoryError(
            f"log_path {log_path} is not a run directory: its {CONFIG} {problem}"
        )
    return recorded


def is_of_gradients(log_path: Path) -> bool:
    """Return whether a directory holds a run of gradients: checkpoints instead of a history."""
    return os.path.isdir(log_path / CHECKPOINTS) and not os.path.exists(log_path / HISTORY)


def check_access(directory: Path) -> None:
    """Refuse a directory that this user may not read; it may be absent.

    Raises:
        RunDirectoryError: It cannot be read.
    """
    try:
        os.scandir(directory).close()
        os.stat(f"{directory}/.")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be read: {error.strerror or error}") from error


def check_kinds(log_path: Path) -> None:
    """Refuse links, pipes and the like in place of a run's files and directories.

    Raises:
        RunDirectoryError: Names one.
    """
    for name in sorted(WRITTEN_BY_RUNS | {LOG}):
        path, is_folder = log_path / name, name in _FOLDERS
        is_wanted = path.is_dir() if is_folder else path.is_file()
        if path.is_symlink() or (path.exists() and not is_wanted):
            wanted = "a directory" if is_folder else "a regular file"
            raise RunDirectoryError(f"log_path {log_path}: {name} must be {wanted}, and no link")


def checked_names(log_path: Path) -> set[str]:
    """Return the names in a run directory, which is created if it is missing.

    Raises:
        RunDirectoryError: Not a directory, not a run's, or a file in it is a link.
    """
    try:
        log_path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in log_path.iterdir()}
    except FileExistsError as error:
        raise RunDirectoryError(f"log_path {log_path} must be a directory, found a file") from error
    except OSError as error:
        raise RunDirectoryError(
            f"log_path {log_path} cannot be used as a directory: {error.strerror or error}"
        ) from error
    check_kinds(log_path)
    names = {
        name for name in names if not name.endswith(PARTIAL_SUFFIX) and name not in (LOCK, LOG)
    }
    if names and CONFIG not in names:
        raise RunDirectoryError(
            f"log_path {log_path} holds no {CONFIG} but {listed(names)}, "
            "so it is not a run directory; give a new or empty directory"
        )
    return names


def listed(names: set[str]) -> str:
    """Return the first three of some files' names, and the number of the others."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def num_rewinds(log_path: Path) -> int:
    """Return how many times a run was rewound."""
    numbers = [int(p.name) for p in (log_path / REWOUND).glob("*") if p.name.isdecimal()]
    return max(numbers, default=0)


# Metrics and rollouts.


def read_metrics(path: Path, damage: list[str] | None = None) -> list[dict[str, float]]:
    """Read the rows of a `metrics.jsonl`, one per generation in order, with NaN for null.

    Arguments and errors are those of `read_rows`.
    """
    return list(read_rows(path, _numbers, damage))


def read_rows(
    path: Path, row_of: Callable[[object], _Row], damage: list[str] | None = None
) -> Iterator[_Row]:
    """Yield the rows of a file of JSON lines, without a torn last line; none if it is missing.

    Args:
        path: path of the file.
        row_of: makes a row of a line's value; raises a ValueError for a damaged line.
        damage: receives the errors; damaged lines are left out then.

    Raises:
        HistoryError: A line is damaged, or the file cannot be read; names it.
    """

    def report(problem: str) -> None:
        if damage is None:
            raise HistoryError(problem)
        damage.append(problem)

    try:
        with opened(path, ANY_SIZE, path.parent) as file:
            for number, line in enumerate(lines(file), start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = row_of(parsed(line))
                except ValueError as error:
                    report(
                        f"{path}, line {number} is damaged: {error}; restore the file from a copy, "
                        "or delete that line, which no run needs to continue"
                    )
                else:
                    yield row
    except FileNotFoundError:
        pass
    except OSError as error:
        report(f"{path} cannot be read: {error.strerror or error}")


def _numbers(found: object) -> dict[str, float]:
    """Convert a JSON value to a row of metrics, with NaN for null."""
    if not isinstance(found, dict):
        raise ValueError(f"it must be a dict, found {found!r:.60}")
    row: dict[str, float] = {}
    for key, value in cast("dict[str, float | None]", found).items():
        if value is None:
            row[key] = math.nan
        elif type(value) in (int, float) and abs(value) <= _LARGEST:
            row[key] = value if abs(value) < 2**63 else float(value)  # NumPy has no larger integer.
        else:
            raise ValueError(f"{key!r:.60} must be a number or null, found {value!r:.60}")
    return row


def lines_before(path: Path, generation: int) -> Iterator[bytes]:
    """Yield the whole lines of metrics or rollouts that belong to generations before this one."""
    key = GENERATION_KEYS[path.name]
    with opened(path, ANY_SIZE, path.parent) as file:
        for line in lines(file):
            try:
                number = cast("dict[str, object]", parsed(line))[key]
            except (ValueError, KeyError, TypeError):
                number = None
            is_later = type(number) is int and number >= generation
            if line.endswith(b"\n") and not is_later:
                yield line


def cut_lines(path: Path, generation: int) -> None:
    """Cut a file of metrics or rollouts to `lines_before`; it may be missing.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    if path.exists() and sum(map(len, lines_before(path, generation))) < path.stat().st_size:
        replace_file(path, lines_before(path, generation))


# The training problems.


def keep_trained_on(
    log_path: Path,
    datasets: Datasets,
    generations: int,
    forked: int = 0,
    more: Iterable[tuple[int, ...]] = (),
) -> None:
    """Record the problems that a run may train on.

    Warn if held-out problems are among them, or if they are not those of the recorded generations.

    Nothing is recorded if they are not known: if problems have no digests, and for a fork whose
    parent has recorded nothing.

    Args:
        log_path: the run's directory.
        datasets: training and held-out problems from now on.
        generations: number of recorded generations.
        forked: number of these that come from another run.
        more: digests of further problems that are trained on.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    found = TrainedOn.of(problem.digests for problem in datasets.train.training_problems)
    if found is not None and (added := TrainedOn.of(more)) is not None:
        found = found.and_of(added)
    shared = found and found.overlap(problem.digests for problem in datasets.test_P)
    if shared:
        logger.warning(
            "%d of the %s are among those that are trained on",
            shared,
            plural(len(datasets.test_P), "held-out problem"),
        )
    before = read_trained_on(log_path) if generations else None
    if found and before and not forked and found.encode() != before.encode():
        logger.warning(
            "the training problems are not those of the %s before: the data or its reader changed",
            plural(generations, "generation"),
        )
    if found is None:
        (log_path / TRAINED_ON).unlink(missing_ok=True)
    elif before is not None or not forked:
        whole = found if before is None else found.and_of(before)
        replace_file(log_path / TRAINED_ON, [whole.encode()])


def read_trained_on(log_path: Path) -> TrainedOn | None:
    """Read the problems that a run may have trained on; None if not recorded, or damaged.

    Raises:
        RunDirectoryError: Something else than a regular file is there.
    """
    try:
        return TrainedOn.decode(read_file(log_path / TRAINED_ON, _MOST_TRAINED_ON, log_path))
    except FileNotFoundError:
        return None


def copy_trained_on(source: Path, target: Path) -> None:
    """Copy the record of the training problems of a run."""
    if (found := read_trained_on(source)) is not None:
        replace_file(target / TRAINED_ON, [found.encode()])


# The log.


@contextlib.contextmanager
def failures_logged(log_path: Path) -> Generator[None]:
    """Write the traceback to `log.txt` if an engine fails in the block."""
    try:
        yield
    except BaseException as error:
        failure = next((each for each in leaves(error) if isinstance(each, EngineError)), None)
        if failure and add_to_log(log_path, "".join(traceback.format_exception(failure))):
            logger.warning("what is known of this failure is in %s", log_path / LOG)
        raise


def add_to_log(log_path: Path, text: str) -> Path | None:
    """Add a text and the time to `log.txt`; returns the path unless the disk refuses."""
    with contextlib.suppress(OSError), appending(log_path / LOG) as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text.rstrip()}\n")
        return log_path / LOG
    return None


# The lock: one process writes a run directory at a time.


@contextlib.contextmanager
def locked(log_path: Path) -> Generator[Recorded]:
    """Lock the run directory for this block, so that no other process writes it.

    The directory is created if it is missing.

    Raises:
        RunDirectoryError: Not a run directory, not writable, or another process writes it (names
            it).
    """
    is_new = not os.path.exists(log_path)  # Accepts a name that is too long.
    checked_names(log_path)
    lock = RunLock(log_path)
    try:
        yield Recorded(log_path)
    finally:
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # Empty only if nothing began.
                log_path.rmdir()


class RunLock:
    """The lock of a run directory, held from construction to `release`.

    It is the operating system's (`flock` on the file `lock`), which releases it when the process
    ends for any reason. The file holds the id of that process, and is deleted at a normal end. On a
    file system without locks a warning is logged.

    Args:
        directory: must exist.

    Raises:
        RunDirectoryError: Another process holds it (names it), or it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        text = str(os.getpid()).encode()
        try:
            self._descriptor = opened_descriptor(self._path, os.O_RDWR | os.O_CREAT, directory)
            if not _flock(self._descriptor):
                pid = os.pread(self._descriptor, _MOST_LOCK, 0).decode("ascii", "replace")
                os.close(self._descriptor)
                raise RunDirectoryError(
                    f"log_path {directory} is being written by process {pid or 'unknown'}; wait "
                    "until that run has ended, or stop it"
                )
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)
        except RunDirectoryError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise cannot("write", self._path, error, needed=len(text)) from error

    def release(self) -> None:
        """Release it; harmless if called twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def _flock(descriptor: int) -> bool:
    import filelock  # 40 ms, which every command would wait for.

    try:
        return filelock.lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("this file system has no locks: start no second run in the same directory")
        return True


def writer_of(directory: Path) -> str | None:
    """Return the process that writes a run directory, "process 123"; None if there is none."""
    try:
        pid = int(read_file(directory / LOCK, _MOST_LOCK, directory))
    except (OSError, ValueError):
        return None
    import psutil  # 30 ms, which every command would wait for.

    return f"process {pid}" if psutil.pid_exists(pid) else None
