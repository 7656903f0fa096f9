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
from es_cookbook.common.errors import (
    ConfigError,
    EngineError,
    RunDirectoryError,
    leaves,
    other_format,
)
from es_cookbook.common.files import (
    ANY_SIZE,
    PARTIAL_SUFFIX,
    appending,
    kind_of,
    lines,
    opened,
    parsed,
    read_file,
)
from es_cookbook.common.terminal import plural
from es_cookbook.rl.problem_env import TrainedOn
from es_cookbook.rl.types import Datasets, Tokenizer
from es_cookbook.runs.directory.lock import LOCK, RunLock
from es_cookbook.runs.files import replace_file
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
"""What may be in a run directory; anything else is not the run's."""
_FOLDERS = {SNAPSHOTS, REWOUND, CHECKPOINTS, TENSORBOARD, "optimizer", "wandb"}
_MOST_DATE = 64
"""Bytes of the record of a date."""
_MOST_TRAINED_ON = 2**28
"""Bytes that are read of a record of training problems: ten million of them have fewer."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run that begins or continues: its history and the Config that it keeps."""

    path: Path
    history: HistoryStore
    config_json: str

    def begin(self) -> None:
        """Write the Config and open the history; cut what the history does not have.

        Before this, nothing in the directory has changed, so the run can still be refused.

        Raises:
            RunDirectoryError: The disk refuses.
        """
        self.keep(self.config_json)
        self.history.begin()
        for name in GENERATION_KEYS:
            cut_lines(self.path / name, self.history.next_generation)

    def keep(self, config_json: str) -> None:
        """Replace the recorded Config.

        Raises:
            RunDirectoryError: The disk refuses.
        """
        replace_file(self.path / CONFIG, [config_json.encode()])


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
def locked(log_path: Path) -> Generator["Recorded"]:
    """Inside, only this process writes the run directory, which is created if it is missing.

    Yields what is recorded there.

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
    """Whether a directory is of a run of gradients: it has checkpoints instead of a history."""
    return os.path.isdir(log_path / CHECKPOINTS) and not (log_path / HISTORY).exists()


def check_access(directory: Path) -> None:
    """Refuse a directory that this user may not read; it may be absent.

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
    """What is recorded in a run directory. Each file is read once, when it is first needed."""

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

    @functools.cached_property
    def fields(self) -> tuple[dict[str, object], str]:
        """The Config as JSON values; nothing that it names is imported.

        Its fields and "", or nothing and the problem with the file: "is missing", for example.

        Raises:
            RunDirectoryError: It is a run's, in another version of the format.
        """
        path = self.log_path / CONFIG
        if not os.path.lexists(path):
            return {}, "is missing"
        try:
            plain = parsed(self.config_json.encode())
        except ConfigError as error:
            return {}, str(error).removeprefix(f"{path} ")
        except ValueError as error:
            return {}, f"cannot be read ({error})"
        if not (isinstance(plain, dict) and "$class" in plain):
            return {}, NO_RUNS
        fields = cast("dict[str, object]", plain)
        if (version := fields.pop(FORMAT, None)) != FORMAT_VERSION:
            raise RunDirectoryError(f"{path}: {other_format(version, FORMAT_VERSION)}")
        return fields, ""

    def check(self, or_of_gradients: bool = False) -> None:
        """Refuse a directory that is not a run's; one with a damaged `config.json` may be.

        Raises:
            RunDirectoryError: It is not, or its run is of another version.
        """
        log_path = self.log_path
        if self.is_of_gradients and not or_of_gradients:
            raise RunDirectoryError(
                f"log_path {log_path} holds a run of gradients, which has no history, so only "
                f"evaluate reads it; its weights are a model: model_name={log_path}"
            )
        check_has_config(log_path)
        if self.fields[1] == NO_RUNS:
            raise RunDirectoryError(
                f"log_path {log_path} holds a {CONFIG} that {NO_RUNS}, so it is not a run directory"
            )


def check_is_run(log_path: Path, or_of_gradients: bool = False) -> Recorded:
    """Returns what is recorded in the directory of a run.

    Raises:
        RunDirectoryError: As `Recorded.check`, or the directory cannot be read.
    """
    check_access(log_path)  # Before it is asked for names.
    recorded = Recorded(log_path)
    recorded.check(or_of_gradients)
    return recorded


def check_has_config(log_path: Path) -> None:
    """Refuse a directory without a `config.json`, which is not read.

    Raises:
        RunDirectoryError: There is none, or the directory cannot be read.
    """
    check_access(log_path)
    check_kinds(log_path)
    if not os.path.exists(log_path / CONFIG):
        raise RunDirectoryError(
            f"log_path {log_path} holds no {CONFIG}, so it is not a run directory"
        )


def check_kinds(log_path: Path) -> None:
    """Refuse links, pipes and the like in place of a run's files and directories.

    Raises:
        RunDirectoryError: Names one.
    """
    for name in sorted(WRITTEN_BY_RUNS | {LOG}):
        wanted = "a directory" if name in _FOLDERS else "a regular file"
        found = kind_of(log_path / name)
        if found not in (None, wanted):
            raise RunDirectoryError(f"log_path {log_path}: {name} is {found}, and must be {wanted}")


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


def lines_before(path: Path, generation: int) -> Iterator[bytes]:
    """The lines of metrics or rollouts except a torn last one and those from `generation` on."""
    key = GENERATION_KEYS[path.name]
    with opened(path, ANY_SIZE, path.parent) as file:
        for line in lines(file):
            number = generation_of(line, key)
            if line.endswith(b"\n") and (number is None or number < generation):
                yield line


def cut_lines(path: Path, generation: int) -> None:
    """Cut a file of metrics or rollouts to `lines_before`; it may be missing.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    if path.exists() and sum(map(len, lines_before(path, generation))) != path.stat().st_size:
        replace_file(path, lines_before(path, generation))


def listed(names: set[str]) -> str:
    """The first three of some files' names, and how many more there are."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
