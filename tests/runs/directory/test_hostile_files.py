"""Pipes, links and devices in place of a run's files are refused at once; nothing outside changes.

Every file and folder of a run x what may be in its place x every command.
"""

import itertools
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.hub.push import files_to_push
from es_cookbook.plugins.report.frames import frames
from es_cookbook.plugins.report.writing import contents
from es_cookbook.plugins.view import runs, show
from es_cookbook.runs.directory.directory import FILES_OF_RUNS
from tests.families import sampled
from tests.runs.directory.test_damaged_directories import RUNS, forked, read, resumed, rewound

FILES = (*FILES_OF_RUNS, "lock", "log.txt", "snapshots/000001.safetensors")
FOLDERS = ("snapshots", "rewound")


def _outside(path: Path) -> Path:
    return path.parents[len(path.parts) - 1 - path.parts.index("run")] / "outside"


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 * 2**30)


KINDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link outside": lambda path: path.symlink_to(_outside(path) / "secret"),
    "link to a folder": lambda path: path.symlink_to(_outside(path)),
    "sparse": _sparse,
    "folder": Path.mkdir,
}


def _pushed(path: Path, _: dict[str, bytes]) -> None:
    files_to_push(path)


def _looked_at(path: Path, _: dict[str, bytes]) -> None:
    show.main(show.Show(log_path=str(path)))


def _reported(path: Path, _: dict[str, bytes]) -> None:
    contents([path])


def _listed(path: Path, _: dict[str, bytes]) -> None:
    runs.main(runs.Runs(directory=str(path.parent)))


def _framed(path: Path, _: dict[str, bytes]) -> None:
    frames(path)


COMMANDS = (resumed, forked, rewound, read, _pushed, _looked_at, _reported, _listed, _framed)


def _make_run(home: Path, original: dict[str, bytes], name: str, kind: str) -> Path:
    for old in home.iterdir():
        shutil.rmtree(old)
    run = home / "run"
    for folder in FOLDERS:
        (run / folder).mkdir(parents=True)
    (home / "outside").mkdir()
    (home / "outside" / "secret").write_bytes(original["history.jsonl"])
    for file, content in original.items():
        (run / file).write_bytes(content)
    path = run / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    return run


def _too_long(_: int, __: FrameType | None) -> None:
    raise TimeoutError("it was not done within 5 s")


@pytest.mark.timeout(0)  # It has an alarm of its own.
def test_what_stands_in_the_place_of_a_runs_file_is_a_sentence(tmp_path: Path) -> None:
    original = {name: (RUNS[0] / name).read_bytes() for name in FILES_OF_RUNS}
    for command in COMMANDS:  # A good run, for what is imported and kept.
        command(_make_run(tmp_path, original, "nothing", "missing"), original)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, _too_long)
    outcomes: Counter[str] = Counter()
    every = itertools.product((*FILES, *FOLDERS), KINDS, COMMANDS)
    for name, kind, command in sampled(every, 150):
        run = _make_run(tmp_path, original, name, kind)
        where = f"{name} is {kind}: {command.__name__}"
        signal.alarm(5)
        try:
            command(run, original)
            outcomes["done"] += 1
        except ESCookbookError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error) and len(str(error)) < 2_000, where
        except AssertionError:
            if kind not in ("missing", "folder", "sparse"):  # Another number than usual.
                raise
        except BaseException as error:
            error.add_note(where)
            raise
        finally:
            signal.alarm(0)
        assert [p.name for p in (tmp_path / "outside").iterdir()] == ["secret"], where
        assert (tmp_path / "outside/secret").read_bytes() == original["history.jsonl"]
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert more < 200 * 1024, f"{more} KiB more than good runs"
    assert outcomes["refused"] > 30, outcomes
