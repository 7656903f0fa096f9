"""The run directory: one directory, one run, and nothing of it is ever lost by accident.

`open_run_directory` decides between a fresh run, going on with a recorded one, and refusing, before
anything expensive starts. It goes on only with the same Config; what may differ is named by the
caller. A run that ended before its first generation (a misspelt model, say) left nothing to lose:
the next one simply takes its place.

The history is the truth about what was done. Each generation is written to `metrics.jsonl` and
`rollouts.jsonl` first and to `history.jsonl` last, each fsynced, so every recorded generation has
its metrics. On resume the lines of generations that the history does not hold are cut from both
files; those generations are run again, come out the same, and are written again: the files end up
with the lines of an unbroken run.
"""

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
import time
import traceback
from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from es_cookbook.common.errors import EngineError, HistoryError, RunDirectoryError, leaves
from es_cookbook.common.files import PARTIAL_SUFFIX, fsync
from es_cookbook.common.terminal import choose, command
from es_cookbook.runs.config_differences import differences
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.history.format import Header
from es_cookbook.runs.history.store import HistoryStore, read_header, read_history
from es_cookbook.runs.lock import LOCK, RunLock

Behavior: TypeAlias = Literal["ask", "resume", "delete", "raise"]
"""What to do about a directory that already holds a run."""

CONFIG = "config.json"
HISTORY = "history.jsonl"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
SNAPSHOTS = "snapshots"
REWOUND = "rewound"
LOG = "log.txt"
GENERATION_KEYS = {METRICS: "progress/generation", ROLLOUTS: "generation"}
"""Files with lines of every generation -> where a line says which."""
_WRITTEN_BY_RUNS = {
    *(CONFIG, HISTORY, METRICS, ROLLOUTS, LOCK, SNAPSHOTS, REWOUND),
    *("optimizer", "report.html", "wandb", "wandb_id"),
}

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """An open run directory: its history for appending, and the run's Config from now on."""

    path: Path
    history: HistoryStore
    config_json: str

    def begin(self) -> tuple[str, ...]:
        """Keep the Config, and cut metrics and rollouts that the history does not hold.

        Up to here a recorded run is as it was (but for a torn last line of the history), so it can
        still be refused.

        Returns:
            What was repaired, one sentence each; also logged.

        Raises:
            RunDirectoryError: The disk refuses.
        """
        replace_file(self.path / CONFIG, [self.config_json.encode()])
        warnings = [self.history.warning]
        for name, key in GENERATION_KEYS.items():
            warnings.append(_drop_unrecorded(self.path / name, key, self.history.next_generation))
        return tuple(filter(None, warnings))


@contextlib.contextmanager
def locked(log_path: Path) -> Generator[None]:
    """Inside, this process alone writes the run directory; it is made where there is none.

    Raises:
        RunDirectoryError: Not a directory, not a run directory, not writable, or another process is
            writing it (says who).
    """
    is_new = not log_path.exists()
    _checked_names(log_path)
    lock = RunLock(log_path)
    try:
        yield
    finally:
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # Only where nothing was begun: it is empty.
                log_path.rmdir()


@contextlib.contextmanager
def failures_told(log_path: Path) -> Generator[None]:
    """Inside, an engine that fails leaves all that is known of it in `log.txt`."""
    try:
        yield
    except BaseException as error:
        for failure in leaves(error):
            if isinstance(failure, EngineError):
                with contextlib.suppress(OSError), (log_path / LOG).open("a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n")
                    file.writelines(traceback.format_exception(failure))
                    logger.warning("what is known of this failure is in %s", log_path / LOG)
                break
        raise


def open_run_directory(
    log_path: Path,
    config_json: str,
    header: Header,
    num_generations: int,
    behavior: Behavior,
    may_differ: Collection[str] = (),
) -> RunDirectory:
    """Open or make the directory of a run; the caller has it `locked`.

    A recorded run goes on, is deleted or refused, or somebody at the terminal is asked, as
    `behavior` says. It goes on only with the same base (`header`), with no fewer generations than
    are recorded and with the same Config, but for the fields that `may_differ` names by dotted
    path; a path stands for everything under it, and the new values are kept.

    Raises:
        RunDirectoryError: Not writable, not a directory, not a run directory, another Config (names
            every field that differs), or a run is there and `behavior` refuses.
        HistoryError: The history is damaged, or began with another base.
    """
    names = _checked_names(log_path)
    history_path = log_path / HISTORY
    resumes = bool(names) and not _is_unused(log_path, names)
    if resumes:
        differing = _differences(log_path, config_json, may_differ)
        decision = _ask(log_path, differing) if behavior == "ask" else behavior
        if decision == "raise":
            raise RunDirectoryError(
                f"log_path {log_path} already holds a run; give another log_path, or "
                "behavior_if_log_dir_exists=resume or delete"
            )
        if decision == "delete":
            _delete(log_path, names)
            resumes = False
        elif differing:
            raise RunDirectoryError(
                f"log_path {log_path} holds a run with another Config: {'; '.join(differing)}; "
                f"give another log_path or the recorded values (what may differ on resuming: "
                f"{', '.join(may_differ) or 'nothing'}), or begin another run with the first "
                f"generations of this one: {command('fork')} log_path={log_path} output=... "
                "FIELD=..."
            )
    if not resumes:
        if history_path.exists():
            replace_file(history_path, [])
        replace_file(log_path / CONFIG, [config_json.encode()])
    history = HistoryStore(history_path, header)
    if num_generations < (recorded := history.next_generation):
        history.close()
        raise RunDirectoryError(
            f"num_generations must be at least {recorded}, since log_path {log_path} holds as "
            f"many generations, found {num_generations}; to do some of them again: "
            f"{command('rewind')} log_path={log_path} generation={num_generations}"
        )
    return RunDirectory(log_path, history, config_json)


def check_is_run(log_path: Path) -> None:
    """Refuse a directory that is not a run's.

    Raises:
        RunDirectoryError: It is not.
    """
    if not (log_path / CONFIG).exists():
        raise RunDirectoryError(
            f"log_path {log_path} holds no {CONFIG}, so it is not a run directory"
        )


def _checked_names(log_path: Path) -> set[str]:
    """What is in the directory of a run, which is made where there is none."""
    try:
        log_path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in log_path.iterdir()}
    except FileExistsError as error:
        raise RunDirectoryError(f"log_path {log_path} must be a directory, found a file") from error
    except OSError as error:
        raise RunDirectoryError(
            f"log_path {log_path} cannot be used as a directory: {error.strerror or error}"
        ) from error
    for name in (CONFIG, HISTORY, METRICS, ROLLOUTS, LOCK, LOG):
        if (log_path / name).is_symlink():
            raise RunDirectoryError(
                f"log_path {log_path}: {name} is a link, and a run writes no files but its "
                "directory's own; put the file itself there"
            )
    names = {
        name for name in names if not name.endswith(PARTIAL_SUFFIX) and name not in (LOCK, LOG)
    }
    if names and CONFIG not in names:
        raise RunDirectoryError(
            f"log_path {log_path} holds no {CONFIG} but {_list(names)}, "
            "so it is not a run directory; give a new or empty directory"
        )
    return names


def _is_unused(log_path: Path, names: set[str]) -> bool:
    """Whether a run was begun here, and nothing else is here, but nothing was recorded."""
    history = log_path / HISTORY
    if not (names <= _WRITTEN_BY_RUNS and history.exists()):
        return False
    with contextlib.suppress(HistoryError):
        header = read_header(history)
        is_fork = header is not None and header.fork is not None
        return not is_fork and next(read_history(history), None) is None
    return False


def _names_its_base(log_path: Path) -> bool:
    """Whether the history tells its base by more than the name that was typed."""
    with contextlib.suppress(HistoryError):
        header = read_header(log_path / HISTORY)
        return header is not None and header.weights is not None
    return False


def lines_before(path: Path, generation_key: str, generation: int) -> Iterator[bytes]:
    """The whole lines of metrics or rollouts that belong to earlier generations."""
    with path.open("rb") as file:
        for line in file:
            try:
                is_earlier = json.loads(line)[generation_key] < generation
            except (ValueError, KeyError, TypeError, RecursionError):  # Torn or damaged.
                continue
            if is_earlier and line.endswith(b"\n"):
                yield line


def _drop_unrecorded(path: Path, generation_key: str, next_generation: int) -> str | None:
    """Cut torn lines and those of generations that the history lacks. Returns a warning if any."""
    if not path.exists():
        return None
    kept = sum(map(len, lines_before(path, generation_key, next_generation)))
    dropped = path.stat().st_size - kept
    if not dropped:
        return None
    replace_file(path, lines_before(path, generation_key, next_generation))
    warning = (
        f"{path}: dropped {dropped} bytes of generations that the history does not hold "
        f"(from {next_generation}); they are run again"
    )
    logger.warning(warning)
    return warning


def _delete(log_path: Path, names: set[str]) -> None:
    """Delete a run, and nothing but a run: model directories have a `config.json` too."""
    foreign = names - _WRITTEN_BY_RUNS
    if foreign:
        raise RunDirectoryError(
            f"log_path {log_path} is not deleted because it holds what no run writes: "
            f"{_list(foreign)}; move that away or give another log_path"
        )
    try:
        # config.json goes last, so that a deletion cut short still leaves a run directory.
        for name in sorted(names, key=lambda name: (name == CONFIG, name != HISTORY)):
            entry = log_path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        fsync(log_path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot delete the run in {log_path}: {error.strerror or error}"
        ) from error


def _ask(log_path: Path, differing: list[str]) -> Literal["resume", "delete"]:
    """Ask the person at the terminal."""
    if not sys.stdin.isatty():
        raise RunDirectoryError(
            f"log_path {log_path} already holds a run and there is no terminal to ask at; "
            "give another log_path, or behavior_if_log_dir_exists=resume, delete or raise"
        )
    question = f"{log_path} already holds a run."
    answers = ["resume", "delete", "abort"]
    if differing:
        question += f"\nIt cannot be resumed because its Config differs: {'; '.join(differing)}."
        answers.remove("resume")
    answer = choose(question, answers, at_end="abort")
    if answer == "abort":
        raise RunDirectoryError(f"log_path {log_path} already holds a run; it was left as it is")
    return "resume" if answer == "resume" else "delete"


def _differences(log_path: Path, config_json: str, may_differ: Collection[str]) -> list[str]:
    """Every field that differs between the recorded Config and this one, in words."""
    # Without its header nothing tells whether the base is the same but its name.
    allowed = set(may_differ) - (set() if _names_its_base(log_path) else {"model_name"})
    try:
        return differences((log_path / CONFIG).read_text("utf-8"), config_json, allowed)
    except (OSError, ValueError, RecursionError) as error:
        return [f"{CONFIG} cannot be read ({error})"]


def _list(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
