"""Run directories that are damaged anyhow: a sentence or the right answer, and nothing overwritten.

Bytes are flipped, files cut, emptied, missing, or of another run. Each directory is then resumed as
far as that goes without an engine, forked, rewound, or read as `play` and `export` do.
"""

import functools
import itertools
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.branches.branches import fork_run, rewind_run
from es_cookbook.runs.config import MAY_DIFFER
from es_cookbook.runs.directory.directory import FILES_OF_RUNS, Recorded
from es_cookbook.runs.directory.opening import begin_in, open_history, run_state
from es_cookbook.runs.history.format import Header
from es_cookbook.runs.history.store import read_header, read_history
from es_cookbook.runs.recorded import open_run

RECORDED = Path(__file__).parents[2] / "data/recorded"
RUNS = [RECORDED / name for name in ("low_rank", "full_rank", "genetic", "adapter")]
UNKNOWN = Header("model", "ab", "cd", "float32")


def content(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def damage(chance: random.Random, files: dict[str, bytes]) -> None:
    """Change one file as disks, copies and people do."""
    name = chance.choice(FILES_OF_RUNS)
    data = files.get(name, b"")
    at = chance.randrange(len(data) + 1)
    match chance.randrange(7):
        case 0 if data:
            files.pop(name)
        case 1:
            files[name] = data[:at]
        case 2 if at < len(data):
            files[name] = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 3:
            files[name] = data + bytes(chance.randrange(300))
        case 4:
            other = chance.choice(RUNS) / name
            files[name] = other.read_bytes()
        case 5:
            lines = data.splitlines(keepends=True)
            files[name] = b"".join(lines[: chance.randrange(len(lines) + 1)])
        case _:
            lines = data.splitlines(keepends=True)
            chance.shuffle(lines)
            files[name] = b"".join(lines[: 1 + chance.randrange(len(lines) + 1)])


@functools.cache
def written_now(recorded: str) -> str:
    """A recorded Config as a program has it now."""
    return config_to_json(config_from_json(recorded, ["tests"]))


def resumed(path: Path, original: dict[str, bytes]) -> None:
    header = read_header(path / "history.jsonl") or UNKNOWN
    config_json = written_now(original["config.json"].decode())
    length = json.loads(config_json)["num_generations"]
    state = run_state(Recorded(path), config_json, length, "resume", MAY_DIFFER)
    history = open_history(path, header, state)
    begin_in(path, history, state, config_json, length)
    history.close()
    assert state.decision in ("resume", "begin")
    assert history.next_generation == state.history.generations


def forked(path: Path, original: dict[str, bytes]) -> None:
    taken = fork_run(path, 2, path.with_name("fork"), original["config.json"].decode())
    assert taken == 2 == len(list(read_history(path.with_name("fork") / "history.jsonl")))


def rewound(path: Path, _: dict[str, bytes]) -> None:
    rewind_run(path, 1)
    assert len(list(read_history(path / "history.jsonl"))) == 1


def read(path: Path, _: dict[str, bytes]) -> None:
    run = open_run(path, trust=["tests"])
    assert run.config.num_generations > 0
    assert [record.generation for record in run.records] == list(range(len(run.records)))


COMMANDS: tuple[Callable[[Path, dict[str, bytes]], None], ...] = (resumed, forked, rewound, read)


def begins_like_one(path: Path) -> bool:
    """Whether a history is made of whole lines of one that was recorded, from the first on."""
    lines = path.read_bytes().splitlines()
    return any(
        all(map(bytes.__eq__, lines[1:], (run / "history.jsonl").read_bytes().splitlines()[1:]))
        for run in RUNS
    )


def cases(home: Path, numbers: range) -> Iterator[str]:
    originals = [{name: (run / name).read_bytes() for name in FILES_OF_RUNS} for run in RUNS]
    seen: set[int] = set()
    for number, command, original in zip(
        numbers, itertools.cycle(COMMANDS), itertools.cycle(originals[:3]), strict=False
    ):
        chance = random.Random(number)
        files = dict(original)
        for _ in range(chance.choice((1, 1, 2))):
            damage(chance, files)
        # Three in ten are as one before: emptied again, or cut where nothing was.
        case = hash((command.__name__, original["config.json"], frozenset(files.items())))
        if case in seen:
            continue
        seen.add(case)
        path = home / "run"
        for old in (path, home / "fork"):
            shutil.rmtree(old, ignore_errors=True)
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        try:
            command(path, original)
            outcome = "done"
        except ESCookbookError as error:
            outcome = "refused"
            assert "\n" not in str(error) and len(str(error)) < 2_000, (number, str(error))
        except BaseException as error:
            error.add_note(f"case {number}: {command.__name__}")
            raise
        now = content(path)
        if outcome == "refused" or command in (forked, read):
            assert now == files, f"case {number}: {command.__name__} changed something"
        else:
            kept_whole = {k.rpartition("/")[2] for k in now if k.startswith("rewound/")}
            for name, data in files.items():
                kept = name in kept_whole or lost_nothing(data, now.get(name, b""), command)
                assert kept, f"case {number}: {command.__name__} lost some of {name}"
        if (home / "fork/history.jsonl").exists():
            assert begins_like_one(home / "fork/history.jsonl"), number
        yield f"{command.__name__} {outcome}"


def lost_nothing(before: bytes, after: bytes, command: Callable[..., None]) -> bool:
    """What is gone are at most the lines of one generation, which are written again."""
    gone = Counter(before.splitlines()) - Counter(after.splitlines())
    return command is resumed and gone.total() <= 5


def check(numbers: range) -> set[str]:
    memory = Path("/dev/shm")
    with (
        pytest.MonkeyPatch.context() as patched,
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as home,
    ):
        patched.setattr(os, "fsync", lambda _: None)
        return set(cases(Path(home), numbers))


ALL = {f"{command.__name__} {outcome}" for command in COMMANDS for outcome in ("done", "refused")}


def test_a_thousand_damaged_directories_are_used_rightly_or_refused() -> None:
    assert check(range(1_000)) == ALL
