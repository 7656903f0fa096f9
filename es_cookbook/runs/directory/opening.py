"""Checks that a run may begin or continue in a directory, and begins it.

The state of a directory is known from files of a few kilobytes, so a mistake is refused before a
model is loaded; nothing is changed until the engine is ready. A run continues only with the same
Config; the caller names the fields that may differ. A run that ended before its first generation (a
misspelt model, say) left nothing to lose, so the next one takes its place.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

from es_cookbook.common.configs import FORMAT, config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, HistoryError, RunDirectoryError
from es_cookbook.common.files import fsync
from es_cookbook.common.terminal import command, one_line, plural
from es_cookbook.runs.directory.directory import (
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    METRICS,
    WRITTEN_BY_RUNS,
    Recorded,
    checked_names,
    cut_lines,
    listed,
)
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.history.format import Header
from es_cookbook.runs.history.store import NOTHING, HistoryStore, Prefix

_MOST_CHARACTERS = 2**21
"""Total length of all field paths of a config; a real one has some thousands."""
_MOST_SHOWN = 300
"""Characters of a name or value in an error message."""
Behavior: TypeAlias = Literal["ask", "resume", "delete", "raise"]
"""What to do if a directory already holds a run."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run directory, and what the run will do there.

    Attributes:
        decision: "begin" if no generation was recorded, "resume", or "delete" and begin.
        config_json: the recorded Config of the run that continues; None if none does.
        history: history of that run.
        metrics: the rows of its generations.
        is_complete: whether all generations and the last evaluation are recorded.
    """

    decision: Literal["begin", "resume", "delete"]
    config_json: str | None = None
    history: Prefix = NOTHING
    metrics: Sequence[Mapping[str, float]] = ()
    is_complete: bool = False


def run_state(
    recorded: Recorded,
    config_json: str,
    num_generations: int,
    behavior: Behavior,
    may_differ: Collection[str] = (),
) -> RunState:
    """Decide what a run does in a directory that the caller has locked.

    `behavior` says whether a recorded run continues, is deleted or refused, or whether the user is
    asked at the terminal. It continues only with at least as many generations as are recorded, and
    with the same Config except for the fields in `may_differ`, dotted paths that include everything
    below them.

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
    refuse_lost_history(recorded, or_shorter=True)
    done = history.generations
    if num_generations < done:
        raise RunDirectoryError(
            f"num_generations must be at least {done}, since log_path {log_path} holds as "
            f"many generations, found {num_generations}; to do some of them again: "
            f"{command('rewind', log_path=log_path, generation=num_generations)}"
        )
    is_complete = done == num_generations and recorded.num_measured > done
    rows = rows_before(recorded.metrics, done)
    return RunState("resume", recorded.config_json, history, rows, is_complete)


def rows_before(
    rows: Sequence[Mapping[str, float]], generation: int
) -> Sequence[Mapping[str, float]]:
    """Return the rows of metrics that belong to generations before this one."""
    return [row for row in rows if not row.get(GENERATION_KEYS[METRICS], -1) >= generation]


def decided(
    recorded: Recorded,
    config_json: str,
    behavior: Behavior,
    may_differ: Collection[str],
    elsewhere: str,
) -> Literal["resume", "delete"]:
    """Decide by `behavior`, or by asking at the terminal, if a run is resumed or deleted.

    `elsewhere` is the alternative for a user with another Config.

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


def begin_in(
    log_path: Path, header: Header, state: RunState, config_json: str, num_generations: int
) -> HistoryStore:
    """Begin or continue a run in the state that `run_state` found; returns its open history.

    Before this, nothing of a recorded run has changed, so it can still be refused. A run to delete
    is deleted. The Config of one that continues stays as it was recorded, except for its length,
    and lines of generations that the history does not have are cut.

    Raises:
        RunDirectoryError: The disk refuses, or the directory holds other files.
        HistoryError: The history began with another base.
    """
    if state.decision == "delete":
        delete_run(log_path)
    if state.config_json is not None and state.history.generations:
        config_json = with_length(state.config_json, num_generations)
    replace_file(log_path / CONFIG, [config_json.encode()])
    for name in GENERATION_KEYS:
        cut_lines(log_path / name, state.history.generations)
    return HistoryStore(log_path / HISTORY, header, state.history)


def with_length(config_json: str, num_generations: int) -> str:
    """Return a recorded Config with another number of generations."""
    plain = json.loads(config_json)
    if plain.get("num_generations") == num_generations:
        return config_json
    plain["num_generations"] = num_generations
    return json.dumps(plain, indent=2, ensure_ascii=False)


def refuse_lost_history(recorded: Recorded, *, or_shorter: bool = False) -> None:
    """Refuse a run that has metrics but no history; damage is ignored.

    With `or_shorter`, also one with metrics of more generations than a crash explains.

    Raises:
        HistoryError: The history is missing or too short.
    """
    found = recorded.history
    if found.generations and not or_shorter:
        return
    log_path, done = recorded.log_path, found.generations
    history, explained = log_path / HISTORY, 0
    if history.exists():  # Metrics of a generation are written before its line, which may be torn.
        explained = done + 1 + (history.stat().st_size > found.num_bytes)
    if recorded.num_measured > explained:
        has = f"holds {plural(done, 'generation')}" if explained else "is missing"
        again = command("rewind", log_path=log_path, generation=done)
        shorter = f"; to continue from what it holds: {again}" if done else ""
        raise HistoryError(
            f"{history} {has}, but {METRICS} is of {recorded.num_measured}; the history is the "
            "checkpoint, so restore it from a copy, or begin again in another log_path" + shorter
        )


def _is_unused(recorded: Recorded, names: set[str]) -> bool:
    """Return whether the directory holds only a run that recorded nothing."""
    if not (names <= WRITTEN_BY_RUNS and HISTORY in names):
        return False
    history = recorded.history
    is_fork = history.header is not None and history.header.fork is not None
    if history.damage or history.generations or is_fork:
        return False
    with contextlib.suppress(HistoryError):
        refuse_lost_history(recorded)
        return True
    return False


def _differences(recorded: Recorded, config_json: str, may_differ: Collection[str]) -> list[str]:
    """Describe every field that differs between the recorded Config and this one."""
    # Without its header nothing tells whether the base is the same but its name.
    allowed = set(may_differ) - (set() if recorded.history.header else {"model_name"})
    try:
        return differences(recorded.config_json, config_json, allowed)
    except (ValueError, RecursionError) as error:
        return [f"{CONFIG} cannot be read ({error})"]


def differences(recorded: str, now: str, may_differ: Collection[str]) -> list[str]:
    """Describe every field that differs between two Configs given as text.

    Fields that the classes of the recorded one have gained since have their defaults. `may_differ`
    are dotted paths that do not count, with everything below them. The recorded one may come from a
    stranger; `now` is of this process, and what it names is trusted.

    Raises:
        ValueError: The recorded text is not JSON.
    """
    old, new = flattened(json.loads(recorded)), flattened(json.loads(now))
    if new.keys() - old.keys():
        with contextlib.suppress(ConfigError):  # With new fields; what is wrong shows below.
            whole = config_to_json(config_from_json(recorded, trust_of(now)))
            old = flattened(json.loads(whole))
    found: list[str] = []
    explained = list(may_differ)
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path) and (path in old) == (path in new):
            continue
        parents = tuple(start + end for start in explained for end in ".[")
        if path in explained or "" in explained or path.startswith(parents):
            continue
        texts = (json.dumps(each[path]) if path in each else "not there" for each in (old, new))
        was, is_now = (
            text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..." for text in texts
        )
        found.append(f"{one_line(path)[:_MOST_SHOWN] or 'Config'} was {was}, is {is_now}")
        explained.append(path)  # Another class at `engine` explains all of its fields.
    return found


def flattened(value: object) -> dict[str, object]:
    """Return every leaf of a JSON config by dotted path; a `$class` has the path of its object.

    The version of the format is left out.

    Raises:
        ValueError: The paths are longer, all together, than any config's.
    """
    flat: dict[str, object] = {}
    waiting, room = [("", value)], _MOST_CHARACTERS
    while waiting:
        path, found = waiting.pop()
        size = len(cast("list[object]", found)) if isinstance(found, dict | list) else 0
        if (room := room - size * (len(path) + 1)) < 0:  # Before the paths are made.
            raise ValueError("it has more fields, or longer names of fields, than a config")
        inner: list[tuple[str, object]] = []
        if isinstance(found, dict):
            for key, entry in cast("dict[str, object]", found).items():
                if key == FORMAT:
                    continue
                named = path if key.startswith("$") else f"{path}.{key}".removeprefix(".")
                inner.append((named, entry))
        elif isinstance(found, list):
            inner = [(f"{path}[{i}]", item) for i, item in enumerate(cast("list[object]", found))]
        if not inner:
            flat[path] = found
        waiting += reversed(inner)
    return flat


def _ask(log_path: Path, differing: list[str]) -> Literal["resume", "delete"]:
    """Ask the user at the terminal."""
    if not sys.stdin.isatty():
        raise RunDirectoryError(
            f"log_path {log_path} already holds a run and there is no terminal to ask at; "
            "give another log_path, or behavior_if_log_dir_exists=resume, delete or raise"
        )
    from rich.prompt import Prompt

    answers = ["resume", "delete", "abort"]
    print(f"{log_path} already holds a run.")
    if differing:
        print(f"It cannot be resumed because its Config differs: {'; '.join(differing)}.")
        answers.remove("resume")
    with contextlib.suppress(EOFError):
        if (answer := Prompt.ask("What to do?", choices=answers)) != "abort":
            return "resume" if answer == "resume" else "delete"
    raise RunDirectoryError(f"log_path {log_path} already holds a run; it was left as it is")


def delete_run(log_path: Path) -> None:
    """Delete a run, and nothing but a run: model directories have a `config.json` too.

    Raises:
        RunDirectoryError: Other files are there too, or the disk refuses.
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
