"""Damaged run directories are used correctly or refused in a sentence, and nothing is overwritten.

Files are cut, emptied, shuffled, replaced, or hold other bytes or JSON values; histories get a
correct checksum, or nothing behind it would be read. Each directory is then resumed as far as that
is possible without an engine, forked, rewound, or read as `play`, `export` and reports do.
"""

import copy
import functools
import json
import math
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.branches.branches import fork_run, rewind_run
from es_cookbook.runs.config import MAY_DIFFER
from es_cookbook.runs.directory.directory import FILES_OF_RUNS, Recorded
from es_cookbook.runs.directory.opening import begin_in, run_state
from es_cookbook.runs.history.format import CHECKSUM_KEY, Header
from es_cookbook.runs.history.store import read_header, read_history
from es_cookbook.runs.recorded import open_run
from es_cookbook.runs.recorder import Progress
from es_cookbook.runs.tracking.curves import table
from es_cookbook.runs.tracking.jsonl import result_of
from es_cookbook.runs.tracking.reading import read_run
from tests.families import sampled

RECORDED = Path(__file__).parents[2] / "data/recorded"
RUNS = [RECORDED / name for name in ("low_rank", "full_rank", "genetic", "adapter")]
UNKNOWN = Header("model", "ab", "cd", "float32")
_NUMBERS = (0, 1, -1, 0.5, -0.0, 1e-320, 1e308, 10**12, 2**63, 10**400, math.nan, math.inf)
_TEXTS = ("", "a", "ü\u202e\x1b[31m\n", "\ud800", "x" * 5000)
VALUES: tuple[Any, ...] = (
    *(None, True, False, *_NUMBERS, *_TEXTS, [], [[]], [None], [1e308, 1e308], {}, {"": 1}),
    *({"$class": "os:system"}, {"$dict": [[[], 1]]}, {"$path": "\x00"}, {"kind": []}),
    {"kind": "muon", "scale": 1.0, "iterations": 10**12},
    {"kind": "adam", "counts": [10**12], "first": [1e200], "second": [-1.0]},
)


def content(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside a JSON value, with each of its keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def of_values(chance: random.Random, text: bytes) -> bytes:
    """A JSON text with some values replaced, deleted, moved or repeated."""
    try:
        value = json.loads(text)
    except ValueError:  # It is damaged already.
        return text
    for _ in range(chance.choice((1, 1, 2))):
        if not (found := list(places(value))):
            break
        (container, key), (other, other_key) = chance.choice(found), chance.choice(found)
        match chance.randrange(5):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, dict):
                container[chance.choice(("$class", "kind", "x\n", "\x1b"))] = 1
            case 2:
                container[key] = copy.deepcopy(other[other_key])
            case 3:
                container[key] = [copy.deepcopy(container[key])] * chance.choice((1, 2, 100))
            case _:
                container[key] = copy.deepcopy(chance.choice(VALUES))
    return json.dumps(value).encode()


def of_bytes(chance: random.Random, data: bytes) -> bytes:
    """A text with some bytes flipped, cut, repeated, added or nested."""
    start = chance.randrange(len(data) + 1)
    end = start + chance.choice((1, 2, 40))
    return data[:start] + chance.choice(
        (
            b"",
            data[end:],
            chance.randbytes(end - start) + data[end:],
            data[start:end] * 3 + data[end:],
            bytes(chance.randrange(300)),
            chance.choice((b"[", b'{"a":')) * 3000 + data[start:],
        )
    )


def damage(chance: random.Random, files: dict[str, bytes]) -> None:
    """Change one file as disks, copies and people do."""
    name = chance.choice(FILES_OF_RUNS)
    data = files.get(name, b"")
    lines = data.splitlines(keepends=True)
    match chance.randrange(8):
        case 0 if data:
            files.pop(name)
        case 1:
            files[name] = (chance.choice(RUNS) / name).read_bytes()
        case 2:
            files[name] = b"".join(lines[: chance.randrange(len(lines) + 1)])
        case 3:
            chance.shuffle(lines)
            files[name] = b"".join(lines[: 1 + chance.randrange(len(lines) + 1)])
        case 4 | 5 if lines and name != "config.json":
            number = chance.randrange(len(lines))
            if name == "history.jsonl" and CHECKSUM_KEY in lines[number]:
                body = of_values(chance, lines[number].rpartition(CHECKSUM_KEY)[0] + b"}")[:-1]
                body += CHECKSUM_KEY + f'{zlib.crc32(body):08x}"}}\n'.encode()
                lines[number] = body
            elif name != "history.jsonl":
                lines[number] = of_values(chance, lines[number]) + b"\n"
            files[name] = b"".join(lines)
        case 4 | 5 if data:
            files[name] = of_values(chance, data)
        case _:
            files[name] = of_bytes(chance, data)


@functools.cache
def written_now(recorded: str) -> str:
    """A recorded Config as a program has it now."""
    return config_to_json(config_from_json(recorded, ["tests"]))


def resumed(path: Path, original: dict[str, bytes]) -> None:
    header = read_header(path / "history.jsonl") or UNKNOWN
    config_json = written_now(original["config.json"].decode())
    length = json.loads(config_json)["num_generations"]
    state = run_state(Recorded(path), config_json, length, "resume", MAY_DIFFER)
    history = begin_in(path, header, state, config_json, length)
    history.close()
    assert state.decision in ("resume", "begin")
    assert history.next_generation == state.history.generations


def forked(path: Path, original: dict[str, bytes]) -> None:
    taken = fork_run(path, 2, path.with_name("fork"), original["config.json"].decode(), {})
    assert taken == 2 == len(list(read_history(path.with_name("fork") / "history.jsonl")))


def rewound(path: Path, _: dict[str, bytes]) -> None:
    rewind_run(path, 1)
    assert len(list(read_history(path / "history.jsonl"))) == 1


def read(path: Path, _: dict[str, bytes]) -> None:
    run = open_run(path, trust=["tests"])
    assert run.config.num_generations > 0
    assert [record.generation for record in run.records] == list(range(len(run.records)))


def reported(path: Path, _: dict[str, bytes]) -> None:
    run = read_run(path)
    list(run.rollouts())
    result_of(path)
    progress = Progress(run.metrics[-1] if run.metrics else {})
    for record in run.records:
        progress.moved(record.step)
    progress.metrics()
    table({"a": [run]}, "test/env/all/correct")


COMMANDS: tuple[Callable[[Path, dict[str, bytes]], None], ...] = (
    *(resumed, forked, rewound, read, reported),
)


def begins_like_one(path: Path) -> bool:
    """Whether a history consists of the first lines of a recorded one, of any header."""
    lines = path.read_bytes().splitlines()
    return any(
        all(map(bytes.__eq__, lines[1:], (run / "history.jsonl").read_bytes().splitlines()[1:]))
        for run in RUNS
    )


def cases(home: Path, numbers: Iterable[int]) -> Iterator[str]:
    originals = [{name: (run / name).read_bytes() for name in FILES_OF_RUNS} for run in RUNS]
    for number in numbers:
        command, original = COMMANDS[number % len(COMMANDS)], originals[number % 3]
        chance = random.Random(number)
        files = dict(original)
        for _ in range(chance.choice((1, 1, 2))):
            damage(chance, files)
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
        if outcome == "refused" or command in (forked, read, reported):
            assert now == files, f"case {number}: {command.__name__} changed something"
        else:
            kept_whole = {k.rpartition("/")[2] for k in now if k.startswith("rewound/")}
            for name, data in files.items():
                if name == "rollouts.jsonl":  # Its lines are written again with their generations.
                    continue
                kept = name in kept_whole or lost_nothing(data, now.get(name, b""), command)
                assert kept, f"case {number}: {command.__name__} lost some of {name}"
        fork, original_history = home / "fork/history.jsonl", original["history.jsonl"]
        if fork.exists() and files["history.jsonl"] in (original_history, b""):
            assert begins_like_one(fork), number
        yield f"{command.__name__} {outcome}"


def lost_nothing(before: bytes, after: bytes, command: Callable[..., None]) -> bool:
    """At most the lines of one generation, which are written again, are gone."""
    gone = Counter(before.splitlines()) - Counter(after.splitlines())
    return command is resumed and gone.total() <= 5


@pytest.mark.slow
def test_a_thousand_damaged_directories_are_used_correctly_or_refused() -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as home:
        found = set(cases(Path(home), sampled(range(6_000), 1_000)))
    assert found == {f"{each.__name__} {end}" for each in COMMANDS for end in ("done", "refused")}
