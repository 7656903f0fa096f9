"""The run directory: one directory, one run, and nothing of it is ever lost by accident.

The history is the truth about what was done. Each generation is written to `metrics.jsonl` and
`rollouts.jsonl` first and to `history.jsonl` last, each fsynced, so every recorded generation has
its metrics. On resume the lines of generations that the history does not hold are cut from both
files; those generations are run again, come out the same, and are written again: the files end up
with the lines of an unbroken run. Where more would be cut than a crash leaves behind, the files are
kept first, as they stand, in `rewound/<n>/`.

Whether a run may begin or go on in a directory is decided by `es_cookbook.runs.directory.opening`.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import time
import traceback
from collections.abc import Generator, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import cast

from es_cookbook.common.configs import FORMAT, FORMAT_VERSION, text_of
from es_cookbook.common.errors import EngineError, RunDirectoryError, leaves, other_format
from es_cookbook.common.files import (
    ANY_SIZE,
    LARGEST_CONFIG,
    PARTIAL_SUFFIX,
    appending,
    kind_of,
    lines,
    opened,
    parsed,
    read_file,
    whole_directory,
)
from es_cookbook.common.terminal import plural
from es_cookbook.rl.problem_env import TrainedOn
from es_cookbook.rl.types import Datasets, Tokenizer
from es_cookbook.runs.directory.lock import LOCK, RunLock
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.history.store import HistoryStore, Prefix, readable_prefix

CONFIG = "config.json"
HISTORY = "history.jsonl"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
SNAPSHOTS = "snapshots"
SNAPSHOT_SUFFIX = ".safetensors"
CHECKPOINTS = "checkpoints"
MODEL = "model"
"""In a checkpoint: a model directory, or one of an adapter."""
REWOUND = "rewound"
LOG = "log.txt"
LOSSES = "losses.csv"
PROFILE = "profile.json"
TENSORBOARD = "tensorboard"
REPORT = "report.html"
WANDB_ID = "wandb_id"
TRAINED_ON = "trained_on.bin"
DATE = "date.txt"
FILES_OF_RUNS = (CONFIG, HISTORY, METRICS, ROLLOUTS)
"""What a run is made of; anything else follows from it or is about it."""
NO_RUNS = "is no run's (a model has one, too)"
"""What is wrong with a `config.json` that has another purpose."""
GENERATION_KEYS = {METRICS: "progress/generation", ROLLOUTS: "generation"}
"""Files with lines of every generation -> where a line says which."""
WRITTEN_BY_RUNS = frozenset(
    {
        *(CONFIG, HISTORY, METRICS, ROLLOUTS, LOCK, SNAPSHOTS, REWOUND, CHECKPOINTS),
        *(LOSSES, PROFILE, REPORT, TENSORBOARD, TRAINED_ON, DATE),
        *("optimizer", "wandb", WANDB_ID),
    }
)
"""What may be in a run directory; anything else is somebody's own."""
_FOLDERS = {SNAPSHOTS, REWOUND, CHECKPOINTS, TENSORBOARD, "optimizer", "wandb"}
_MOST_DATE = 64
"""Bytes of the record of a date."""
_MOST_TRAINED_ON = 2**28
"""Bytes that are read of a record of training problems: ten million of them have fewer."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """An open run directory: its history for appending, and the Config that it keeps."""

    path: Path
    history: HistoryStore
    config_json: str

    def begin(self) -> tuple[str, ...]:
        """Keep the Config, and cut what the history does not hold.

        Up to here a recorded run is as it was, so it can still be refused.

        Returns:
            What was repaired, one sentence each; also logged.

        Raises:
            RunDirectoryError: The disk refuses.
        """
        warnings: list[str | None] = []
        found = {name: self._survey(name) for name in GENERATION_KEYS}
        if not (self.history.is_orderly and all(is_orderly for _, is_orderly in found.values())):
            warnings.append(
                f"{self.path} holds what cannot be read, or generations that its history does not "
                f"hold; as it stood it is kept in {set_aside(self.path)}"
            )
            logger.warning(warnings[0])
        self.keep(self.config_json)
        self.history.begin()
        warnings.append(self.history.warning)
        warnings += [self._drop(name, num_bytes) for name, (num_bytes, _) in found.items()]
        return tuple(filter(None, warnings))

    def keep(self, config_json: str) -> None:
        """Keep this Config, which is the run's from now on.

        Raises:
            RunDirectoryError: The disk refuses.
        """
        replace_file(self.path / CONFIG, [config_json.encode()])

    def _survey(self, name: str) -> tuple[int, bool]:
        """Bytes that the history does not hold, and whether a crash explains them.

        That is so where whole lines are of recorded generations, or of the one that was going on.
        """
        path, key, recorded = self.path / name, GENERATION_KEYS[name], self.history.next_generation
        dropped, is_orderly = 0, True
        if path.exists():
            with opened(path, ANY_SIZE, self.path) as file:
                for line in lines(file):
                    if _is_before(line, key, recorded):
                        continue
                    dropped += len(line)
                    number = generation_of(line, key)
                    is_orderly &= number == recorded or not line.endswith(b"\n")
        return dropped, is_orderly

    def _drop(self, name: str, num_bytes: int) -> str | None:
        """Cut what `_survey` found the history not to hold; returns a warning."""
        if not num_bytes:
            return None
        path, recorded = self.path / name, self.history.next_generation
        was_finished = name == METRICS and _ends_with_evaluation(path, num_bytes)
        replace_file(path, lines_before(path, GENERATION_KEYS[name], recorded))
        if was_finished:
            return None
        warning = (
            f"{path}: dropped {num_bytes} bytes of generations that the history does not hold "
            f"(from {recorded}); they are run again"
        )
        logger.warning(warning)
        return warning


def set_aside(log_path: Path) -> Path:
    """Copy a run as it stands to `rewound/<n>/`, a run directory itself; returns that.

    Snapshots are large, so they are not copied. The run in W&B is that of the copy from now on.

    Raises:
        RunDirectoryError: The disk refuses; nothing is left of the copy.
    """
    rewound = log_path / REWOUND / str(num_rewinds(log_path) + 1)
    with new_directory(rewound) as beside:
        for name in FILES_OF_RUNS:
            if (log_path / name).exists():
                with opened(log_path / name, ANY_SIZE, log_path) as file:
                    replace_file(beside / name, lines(file))
        copy_asked(log_path, beside)
    if (log_path / WANDB_ID).is_file():  # W&B's run has what is cut off now.
        (log_path / WANDB_ID).rename(rewound / WANDB_ID)
    return rewound


def num_rewinds(log_path: Path) -> int:
    """How often a run was rewound."""
    numbers = [int(p.name) for p in (log_path / REWOUND).glob("*") if p.name.isdecimal()]
    return max(numbers, default=0)


def keep_trained_on(
    log_path: Path,
    datasets: Datasets,
    generations: int,
    forked: int = 0,
    more: Iterable[tuple[int, ...]] = (),
) -> None:
    """Record what a run may train on, beside what it could before; warn where that is held out.

    Nothing is recorded where it is not known: where problems have no digests, and of a fork whose
    parent has recorded nothing.

    Args:
        log_path: the run's directory.
        datasets: what is trained on from now on, and what is held out.
        generations: how many are recorded.
        forked: how many of them are another run's.
        more: digests of other problems that are trained on.

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
    if found is None:
        (log_path / TRAINED_ON).unlink(missing_ok=True)
    elif before is not None or not forked:
        whole = found if before is None else found.and_of(before)
        replace_file(log_path / TRAINED_ON, [whole.encode()])


def read_trained_on(log_path: Path) -> TrainedOn | None:
    """What a run may have trained on; None where that is not recorded, or damaged.

    Raises:
        RunDirectoryError: It is no file that a run makes.
    """
    try:
        return TrainedOn.decode(read_file(log_path / TRAINED_ON, _MOST_TRAINED_ON, log_path))
    except FileNotFoundError:
        return None


def keep_date(log_path: Path, tokenizer: Tokenizer, *, writes: bool = True) -> None:
    """Have a chat template that tells the date tell that of the run's beginning, and record it.

    Args:
        log_path: the run's directory.
        tokenizer: with the template, or with none.
        writes: record the present where no date is recorded; else it is told and not recorded.

    Raises:
        RunDirectoryError: What is recorded is no date, or the disk refuses.
    """
    if tokenizer.chat_template is None:
        return
    from es_cookbook.rl.messages.template import ChatTemplate, fix_date

    if not ChatTemplate.tells_date(tokenizer):
        return
    path, date = log_path / DATE, datetime.now()
    try:
        date = datetime.fromisoformat(read_file(path, _MOST_DATE, log_path).decode().strip())
    except FileNotFoundError:
        if writes:
            replace_file(path, [f"{date.isoformat(timespec='seconds')}\n".encode()])
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} must be the time at which the run began, such as 2026-01-31T12:00:00"
        ) from error
    fix_date(tokenizer, date)


def copy_asked(source: Path, target: Path) -> None:
    """Copy what is recorded of what a run may have trained on, and of the date in its prompts."""
    if (found := read_trained_on(source)) is not None:
        replace_file(target / TRAINED_ON, [found.encode()])
    with contextlib.suppress(FileNotFoundError):
        replace_file(target / DATE, [read_file(source / DATE, _MOST_DATE, source)])


@contextlib.contextmanager
def new_directory(path: Path) -> Generator[Path]:
    """A run directory to fill, there whole or not at all; its failures are sentences."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(path) as beside:
            yield beside
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise cannot("make", path, error, needed=4096) from error


@contextlib.contextmanager
def locked(log_path: Path) -> Generator[None]:
    """Inside, this process alone writes the run directory; it is made where there is none.

    Raises:
        RunDirectoryError: Not a directory, not a run directory, not writable, or another process is
            writing it (says who).
    """
    is_new = not os.path.exists(log_path)  # Which asks nothing of a name that is too long.
    checked_names(log_path)
    lock = RunLock(log_path)
    try:
        yield
    finally:
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # Only where nothing was begun: it is empty.
                log_path.rmdir()


@contextlib.contextmanager
def failures_logged(log_path: Path) -> Generator[None]:
    """Inside, an engine that fails leaves all that is known of it in `log.txt`."""
    try:
        yield
    except BaseException as error:
        for failure in leaves(error):
            if isinstance(failure, EngineError):
                if add_to_log(log_path, "".join(traceback.format_exception(failure))):
                    logger.warning("what is known of this failure is in %s", log_path / LOG)
                break
        raise


def add_to_log(log_path: Path, text: str) -> Path | None:
    """Add a text and the time to `log.txt`; returns that file if the disk took it."""
    with contextlib.suppress(OSError), appending(log_path / LOG) as file:
        shown = text.rstrip().encode("utf-8", "backslashreplace").decode()
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{shown}\n")
        return log_path / LOG
    return None


def is_of_gradients(log_path: Path) -> bool:
    """Whether a directory is of a run of gradients: it has checkpoints in place of a history."""
    return os.path.isdir(log_path / CHECKPOINTS) and not (log_path / HISTORY).exists()


def check_access(directory: Path) -> None:
    """Refuse a directory of which this user may not see the names, or the files; one may be absent.

    Raises:
        RunDirectoryError: It is so.
    """
    try:
        os.scandir(directory).close()
        os.stat(f"{directory}/.")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be read: {error.strerror or error}") from error


class Recorded:
    """What is recorded in a run directory. A file is read when it is first asked for, and once."""

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
    def is_of_gradients(self) -> bool:
        """Whether a gradient moves its model."""
        return is_of_gradients(self.log_path)

    def has_config(self) -> bool:
        """Whether its `config.json` is a run's, as a damaged one may be.

        Raises:
            RunDirectoryError: It is a run's, in another version of the format.
        """
        with contextlib.suppress(ValueError, RecursionError):
            return _fields(self.log_path, parsed(self.config_json.encode()))[1] != NO_RUNS
        return True


def check_is_run(log_path: Path, or_of_gradients: bool = False) -> Recorded:
    """Refuse a directory that is not a run's; a `config.json` that is damaged may be one.

    Returns:
        What is recorded there.

    Raises:
        RunDirectoryError: It is not, or its run is of another version.
    """
    check_access(log_path)
    recorded = Recorded(log_path)
    if recorded.is_of_gradients and not or_of_gradients:
        raise RunDirectoryError(
            f"log_path {log_path} holds a run of gradients, which has no history, so only evaluate "
            f"reads it; its weights are a model: model_name={log_path}"
        )
    check_kinds(log_path)
    if not os.path.exists(log_path / CONFIG):
        raise RunDirectoryError(
            f"log_path {log_path} holds no {CONFIG}, so it is not a run directory"
        )
    if not recorded.has_config():
        raise RunDirectoryError(
            f"log_path {log_path} holds a {CONFIG} that {NO_RUNS}, so it is not a run directory"
        )
    return recorded


def check_kinds(log_path: Path) -> None:
    """Refuse what stands in the place of a run's file or folder and is none, or none of its own.

    Raises:
        RunDirectoryError: It is a link, a pipe, a device, a folder in the place of a file.
    """
    for name in sorted(WRITTEN_BY_RUNS | {LOG}):
        wanted = "a directory" if name in _FOLDERS else "a regular file"
        found = kind_of(log_path / name)
        if found not in (None, wanted):
            raise RunDirectoryError(
                f"log_path {log_path}: {name} is {found}, and must be {wanted} of its own"
            )


def recorded_fields(log_path: Path) -> tuple[dict[str, object], str]:
    """The Config of anybody's run as JSON values; nothing that it names is imported.

    Returns:
        Its fields and "", or none and what is wrong with the file: "is missing", say.

    Raises:
        RunDirectoryError: It is a run's, in another version of the format.
    """
    try:
        plain = parsed(read_file(log_path / CONFIG, LARGEST_CONFIG, log_path))
    except FileNotFoundError:
        return {}, "is missing"
    except OSError as error:
        return {}, f"cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return {}, f"cannot be read ({error})"
    return _fields(log_path, plain)


def _fields(log_path: Path, plain: object) -> tuple[dict[str, object], str]:
    if not (isinstance(plain, dict) and "$class" in plain):
        return {}, NO_RUNS
    fields = cast("dict[str, object]", plain)
    if (version := fields.pop(FORMAT, None)) != FORMAT_VERSION:
        raise RunDirectoryError(f"{log_path / CONFIG}: {other_format(version, FORMAT_VERSION)}")
    return fields, ""


def checked_names(log_path: Path) -> set[str]:
    """What is in the directory of a run, which is made where there is none.

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


def generation_of(line: bytes, generation_key: str) -> int | None:
    """The generation of a line of metrics or rollouts; None where it is torn or damaged."""
    try:
        found = cast("dict[str, object]", parsed(line))
        number = found[generation_key]
    except (ValueError, KeyError, TypeError):
        return None
    return number if type(number) is int else None


def lines_before(path: Path, generation_key: str, generation: int) -> Iterator[bytes]:
    """The whole lines of metrics or rollouts that belong to earlier generations."""
    with opened(path, ANY_SIZE, path.parent) as file:
        for line in lines(file):
            if _is_before(line, generation_key, generation):
                yield line


def _ends_with_evaluation(path: Path, num_bytes: int) -> bool:
    """Whether the last bytes are the row of a finished run's last evaluation, and nothing else."""
    with opened(path, ANY_SIZE, path.parent) as file:
        file.seek(-num_bytes, os.SEEK_END)
        end = file.read(1 << 20)
    return end.count(b"\n") == 1 and end.endswith(b"\n") and b'"reward/mean"' not in end


def _is_before(line: bytes, generation_key: str, generation: int) -> bool:
    number = generation_of(line, generation_key)
    return number is not None and number < generation and line.endswith(b"\n")


def listed(names: set[str]) -> str:
    """The first three of some files' names, and how many more there are."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
