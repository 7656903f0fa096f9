"""Whatever the files of a run directory hold, reading them succeeds or ends in one sentence.

Real files of recorded runs are damaged by bytes, lines and JSON values, with a seed each. Histories
get a checksum that is right again, or nothing behind it would ever be read.
"""

import copy
import json
import math
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from es_cookbook.common.configs import load_config
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.evolution.exact import MODULUS, fingerprint_span
from es_cookbook.plugins.branches.branches import fork_run, rewind_run
from es_cookbook.runs.centre.replay import latest_snapshot
from es_cookbook.runs.centre.snapshots import write_snapshot
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import lines_before
from es_cookbook.runs.export.export import curve
from es_cookbook.runs.history.format import CHECKSUM_KEY
from es_cookbook.runs.history.store import read_header, read_history, read_prefix
from es_cookbook.runs.recorder import Progress
from es_cookbook.runs.tracking.curves import table
from es_cookbook.runs.tracking.jsonl import read_metrics, result_of
from es_cookbook.runs.tracking.reading import read_run

RECORDED = Path(__file__).parents[2] / "data/recorded"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 10**12, -(10**12), 2**63),
    *(
        10**400,
        math.nan,
        math.inf,
        -math.inf,
        "",
        "a",
        "0",
        "ü\u202e\x1b[31m\n",
        "\ud800",
        "x" * 5000,
    ),
    *([], [[]], [None], [1.0], [1e308, 1e308], [math.nan] * 3, {}, {"": 1}, {"$tuple": []}),
    *({"$class": "os:system"}, {"$float": "nan"}, {"$dict": [[1, 2]]}, {"$dict": [[[], 1]]}),
    *({"$path": "\x00"}, {"kind": "muon", "scale": 1.0, "iterations": 10**12}, {"kind": []}),
    *(
        {"kind": "adam", "counts": [10**12], "first": [1e200], "second": [-1.0]},
        {"kind": "offsets"},
    ),
)


def of_bytes(random: random.Random, data: bytes) -> bytes:
    """Flip, delete, insert, repeat or cut some bytes or lines."""
    lines = data.splitlines(keepends=True)
    start = random.randrange(len(data))
    end = min(len(data), start + random.choice((1, 1, 2, 40)))
    line = random.randrange(len(lines))
    match random.randrange(9):
        case 0:
            return data[:start]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:start] + random.randbytes(end - start) + data[end:]
        case 3:
            return data[:start] + data[start:end] * 3 + data[end:]
        case 4:
            return (
                data[:start] + bytes([data[start] ^ 1 << random.randrange(8)]) + data[start + 1 :]
            )
        case 5:
            return b"".join(lines[:line] + lines[line + 1 :])
        case 6:
            return b"".join(lines[:line] + lines[line : line + 1] * 2 + lines[line + 1 :])
        case 7:
            return b"".join(random.sample(lines, len(lines)))
        case _:
            return data[:start] + random.choice((b"[", b'{"a":')) * 3000 + data[start:]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container inside a JSON value, with each of its keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def of_values(random: random.Random, text: bytes) -> bytes:
    """Replace, delete, add or move some values of a JSON text."""
    value = json.loads(text)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        found = list(places(value))
        if not found:
            break
        container, key = random.choice(found)
        other, other_key = random.choice(found)
        match random.randrange(6):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, dict):
                container[random.choice(("$class", "kind", "version", "x\n", "\x1b"))] = 1
            case 2:
                container[key] = copy.deepcopy(other[other_key])
            case 3:
                container[key] = [copy.deepcopy(container[key])] * random.choice((1, 2, 100))
            case _:
                container[key] = copy.deepcopy(random.choice(VALUES))
    return json.dumps(value).encode()


def damaged(random: random.Random, data: bytes, name: str) -> bytes:
    """A file of a run directory that is not as it was written."""
    if random.randrange(2):
        return of_bytes(random, data)
    if name == "config.json":
        return of_values(random, data)
    lines = data.splitlines(keepends=True)
    number = random.randrange(len(lines))
    line = lines[number]
    if name == "history.jsonl":
        body = line.rpartition(CHECKSUM_KEY)[0] + b"}"
        body = of_values(random, body).rstrip()[:-1]
        line = body + CHECKSUM_KEY + f'{zlib.crc32(body):08x}"}}\n'.encode()
    else:
        line = of_values(random, line) + b"\n"
    return b"".join([*lines[:number], line, *lines[number + 1 :]])


def read_config(path: Path) -> None:
    load_config(path, Config, ["tests.fakes"])


def read_all_of_history(path: Path) -> None:
    read_header(path)
    progress = Progress({})
    for record in read_history(path):
        progress.moved(record.step)
    progress.metrics()
    prefix = read_prefix(path, None)
    b"".join(prefix.encode())


def read_all_of_metrics(path: Path) -> None:
    rows = read_metrics(path)
    result_of(path.parent)
    list(lines_before(path, 2))
    if rows:
        Progress(rows[-1])
        table({"a": [read_run(path.parent)]}, "test/env/all/correct")
    curve(path, 3)


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_config,
    "history.jsonl": read_all_of_history,
    "metrics.jsonl": read_all_of_metrics,
    "rollouts.jsonl": lambda path: list(lines_before(path, 2)),
}


def read_damaged(directory: Path, cases: range) -> dict[str, int]:
    """Damage and read files, a seed a case. Returns how many were read and refused."""
    files = [
        path
        for path in sorted(RECORDED.rglob("*.json*"))
        if path.name in READERS or path.parent.name == "configs"
    ]
    counts = {"read": 0, "refused": 0}
    for case in cases:
        source = files[case % len(files)]
        name = source.name if source.name in READERS else "config.json"
        data = damaged(random.Random(case), source.read_bytes(), name)
        (directory / name).unlink(missing_ok=True)  # Much faster than to write over it.
        (directory / name).write_bytes(data)
        try:
            READERS[name](directory / name)
            counts["read"] += 1
        except ESCookbookError as error:
            counts["refused"] += 1
            said = str(error)
            assert "\n" not in said and len(said) < 1_000, (case, source, said)
        except BaseException as error:
            error.add_note(f"case {case}: {source}")
            raise
    return counts


def test_two_thousand_damaged_files_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    counts = read_damaged(tmp_path, range(2_000))
    assert counts["refused"] > 1_000 and counts["read"] > 200


def test_a_run_with_a_damaged_file_is_forked_and_rewound_or_refused(tmp_path: Path) -> None:
    outcomes: set[str] = set()
    for case in range(36):
        run = shutil.copytree(RECORDED / "low_rank", tmp_path / str(case))
        name = ("history.jsonl", "metrics.jsonl", "rollouts.jsonl")[case % 3]
        data = damaged(random.Random(case), (run / name).read_bytes(), name)
        (run / name).write_bytes(data)
        for generation in (1, 3):
            try:
                fork_run(run, generation, run / f"fork{generation}", "{}")
                rewind_run(run, generation)
                outcomes.add("done")
            except ESCookbookError as error:
                assert "\n" not in str(error)
                outcomes.add("refused")
    assert outcomes == {"done", "refused"}


def test_a_damaged_snapshot_is_left_out(tmp_path: Path) -> None:
    centre = torch.linspace(-1, 1, 60).view(3, 20)
    fingerprint = fingerprint_span("weight", centre.view(-1), 0) % MODULUS
    write_snapshot(tmp_path, 2, fingerprint, [("weight", (3, 20))], [("weight", centre)])
    path = tmp_path / "snapshots/000002.safetensors"
    whole = path.read_bytes()
    assert latest_snapshot(tmp_path, [0, fingerprint]) is not None
    for case in range(500):
        path.write_bytes(of_bytes(random.Random(case), whole))
        found = latest_snapshot(tmp_path, [0, fingerprint])
        if found is not None:  # Damaged where nothing is read from.
            assert torch.equal(found.tensors["weight"], centre)
