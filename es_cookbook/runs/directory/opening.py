"""Whether a run may begin or go on in a directory, and that it does.

What stands there is told from files of a few kilobytes, so a mistake is refused before a model is
loaded; nothing is changed until the engine is there. A run goes on only with the same Config; what
may differ is named by the caller. A run that ended before its first generation (a misspelt model,
say) left nothing to lose: the next one simply takes its place.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeAlias

from es_cookbook.common.errors import HistoryError, RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, fsync, lines, opened
from es_cookbook.common.terminal import choose, command, plural
from es_cookbook.runs.directory.config_differences import differences
from es_cookbook.runs.directory.directory import (
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    WRITTEN_BY_RUNS,
    Recorded,
    RunDirectory,
    checked_names,
    generation_of,
    listed,
)
from es_cookbook.runs.history.format import Header
from es_cookbook.runs.history.store import NOTHING, HistoryStore, Prefix

Behavior: TypeAlias = Literal["ask", "resume", "delete", "raise"]
"""What to do about a directory that already holds a run."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunState:
    """What a run finds in its directory, and what it will do there.

    Attributes:
        decision: "begin" where no generation was recorded, "resume", or "delete" and begin.
        config_json: of the run that goes on, as it was recorded; None if none does.
        history: of that run; nothing where none goes on.
        is_complete: whether these are all generations, and the last evaluation is there too.
    """

    decision: Literal["begin", "resume", "delete"]
    config_json: str | None = None
    history: Prefix = NOTHING
    is_complete: bool = False


def run_state(
    recorded: Recorded,
    config_json: str,
    num_generations: int,
    behavior: Behavior,
    may_differ: Collection[str] = (),
) -> RunState:
    """What a run that is about to begin or to go on does in a directory; the caller has it locked.

    `behavior` says whether a recorded run continues, is deleted or refused, or whether the user is
    asked at the terminal. It continues only with no fewer generations than are recorded and with
    the same Config, except for the fields that `may_differ` names by dotted path; a path stands for
    everything under it.

    Raises:
        RunDirectoryError: Not a run directory, another Config (names every field that differs), or
            a run is there and `behavior` refuses.
        HistoryError: The history is damaged or missing.
    """
    log_path = recorded.log_path
    names = checked_names(log_path)
    if not names or _is_unused(recorded, names):
        return RunState("begin")
    elsewhere = (
        "begin another run with the first generations of this one: "
        f"{command('fork', log_path=log_path, output='...')} FIELD=..."
    )
    if decided(recorded, config_json, behavior, may_differ, elsewhere) == "delete":
        return RunState("delete")
    history = recorded.history
    if history.damage is not None:
        raise history.damage
    refuse_lost_history(log_path, history, or_shorter=True)
    done = history.generations
    if num_generations < done:
        raise RunDirectoryError(
            f"num_generations must be at least {done}, since log_path {log_path} holds as "
            f"many generations, found {num_generations}; to do some of them again: "
            f"{command('rewind', log_path=log_path, generation=num_generations)}"
        )
    is_complete = done == num_generations and num_measured(log_path, METRICS) > done
    return RunState("resume", recorded.config_json, history, is_complete)


def decided(
    recorded: Recorded,
    config_json: str,
    behavior: Behavior,
    may_differ: Collection[str],
    elsewhere: str,
) -> Literal["resume", "delete"]:
    """Whether a recorded run continues or is deleted: `behavior`, or the answer at the terminal.

    `elsewhere` is what else can be done where its Config is another.

    Raises:
        RunDirectoryError: Another Config (names every field that differs), one of another version,
            or `behavior` refuses.
    """
    _ = recorded.fields  # Refuses another version of the format.
    log_path, differing = recorded.log_path, _differences(recorded, config_json, may_differ)
    decision = _ask(log_path, differing) if behavior == "ask" else behavior
    if decision == "raise":
        raise RunDirectoryError(
            f"log_path {log_path} already holds a run; give another log_path, or "
            "behavior_if_log_dir_exists=resume or delete"
        )
    if decision == "resume" and differing:
        raise RunDirectoryError(
            f"log_path {log_path} holds a run with another Config: {'; '.join(differing)}; "
            f"give another log_path or the recorded values (what may differ on resuming: "
            f"{', '.join(may_differ) or 'nothing'}), or {elsewhere}"
        )
    return decision


def open_run_directory(
    log_path: Path, config_json: str, num_generations: int, header: Header, state: RunState
) -> RunDirectory:
    """Open or make the directory of a run in the state that `run_state` found; it is `locked`.

    Of a run that goes on the Config stays as it was recorded, but for its length.

    Raises:
        RunDirectoryError: Not writable.
        HistoryError: The history began with another base.
    """
    if state.decision == "delete":
        delete_run(log_path)
    if state.config_json is not None:
        config_json = with_length(state.config_json, num_generations)
    history = HistoryStore(log_path / HISTORY, header, state.history)
    return RunDirectory(log_path, history, config_json)


def refuse_lost_history(log_path: Path, found: Prefix, *, or_shorter: bool = False) -> None:
    """Refuse a run that has metrics or rollouts but no history; damage is ignored.

    Args:
        log_path: the run's directory.
        found: of its history; one generation is enough.
        or_shorter: also refuse metrics of more generations than a crash explains; `found` is whole.

    Raises:
        HistoryError: It is so.
    """
    if found.generations and not or_shorter:
        return
    history, done = log_path / HISTORY, found.generations
    explained = 0
    if history.exists():  # Metrics of a generation are written before its line, which may be torn.
        explained = done + 1 + (history.stat().st_size > found.num_bytes)
    for name in GENERATION_KEYS:
        if (measured := num_measured(log_path, name)) > explained:
            has = f"holds {plural(done, 'generation')}" if explained else "is missing"
            again = command("rewind", log_path=log_path, generation=done)
            shorter = f"; to continue from what it holds: {again}" if done else ""
            raise HistoryError(
                f"{history} {has}, but {name} is of {measured}; the history is the checkpoint, so "
                f"restore it from a copy, or begin again in another log_path{shorter}"
            )


def num_measured(log_path: Path, name: str) -> int:
    """How many generations have lines in metrics or rollouts; the last evaluation counts as one.

    Raises:
        HistoryError: A line is damaged that is not torn; names it.
    """
    path, measured = log_path / name, 0
    if not path.exists():
        return 0
    with opened(path, ANY_SIZE, log_path) as file:
        for number, line in enumerate(lines(file), start=1):
            generation = generation_of(line, GENERATION_KEYS[name])
            if generation is not None:
                measured = max(measured, generation + 1)
            elif line.endswith(b"\n"):
                raise HistoryError(
                    f"{path}, line {number} is damaged: restore the file from a copy, or delete "
                    "that line; no run needs it to continue"
                )
    return measured


def _is_unused(recorded: Recorded, names: set[str]) -> bool:
    """Whether a run was begun here, and nothing else is here, but nothing was recorded."""
    if not (names <= WRITTEN_BY_RUNS and HISTORY in names):
        return False
    history = recorded.history
    is_fork = history.header is not None and history.header.fork is not None
    if history.damage or history.generations or is_fork:
        return False
    with contextlib.suppress(HistoryError):
        refuse_lost_history(recorded.log_path, history)
        return True
    return False


def _differences(recorded: Recorded, config_json: str, may_differ: Collection[str]) -> list[str]:
    """Every field that differs between the recorded Config and this one, in words."""
    # Without its header nothing tells whether the base is the same but its name.
    allowed = set(may_differ) - (set() if recorded.history.header else {"model_name"})
    try:
        return differences(recorded.config_json, config_json, allowed)
    except (ValueError, RecursionError) as error:
        return [f"{CONFIG} cannot be read ({error})"]


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


def delete_run(log_path: Path) -> None:
    """Delete a run, and nothing but a run: model directories have a `config.json` too.

    Raises:
        RunDirectoryError: What no run writes is there too, or the disk refuses.
    """
    names = checked_names(log_path)
    foreign = names - WRITTEN_BY_RUNS
    if foreign:
        raise RunDirectoryError(
            f"log_path {log_path} is not deleted because it holds what no run writes: "
            f"{listed(foreign)}; move that away or give another log_path"
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


def with_length(config_json: str, num_generations: int) -> str:
    """A recorded Config, of a run of another length if it says another."""
    plain = json.loads(config_json)
    if plain["num_generations"] == num_generations:
        return config_json
    plain["num_generations"] = num_generations
    return json.dumps(plain, indent=2, ensure_ascii=False)
