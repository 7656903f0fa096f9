"""Whatever stands in the place of a run's file or folder: a sentence at once, and nothing outside.

Every file and folder of a run x what may stand there x what commands do with a run.
"""

import ast
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import es_cookbook
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.hub.push import files_to_push
from es_cookbook.plugins.report.frames import frames
from es_cookbook.plugins.report.writing import contents
from es_cookbook.plugins.view import runs, show
from es_cookbook.runs.directory.directory import FILES_OF_RUNS
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
def test_what_stands_in_the_place_of_a_runs_file_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    original = {name: (RUNS[0] / name).read_bytes() for name in FILES_OF_RUNS}
    for command in COMMANDS:  # A good run, for what is imported and kept.
        command(_make_run(tmp_path, original, "nothing", "missing"), original)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, _too_long)
    outcomes: Counter[str] = Counter()
    for name in (*FILES, *FOLDERS):
        for kind in KINDS:
            for command in COMMANDS:
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
    assert outcomes["refused"] > 100, outcomes


ROOMS = (
    "runs",
    "checkpoints",
    "cli",
    "plugins/hub",
    "plugins/report",
    "plugins/gguf",
    "plugins/quantised",
    "plugins/branches",
    "plugins/play",
    "plugins/sweep",
    "plugins/view",
)
OWN = {
    "plugins/sweep/worker.py": "output of processes of its own",
    "cli/__init__.py": "the first lines of commands",
    "runs/files.py": "writes a new file",
    "runs/setup.py": "opens a run, not a file",
    "plugins/hub/sets.py": "the cache of datasets, and files of data",
    "plugins/report/writing.py": "a part of the package",
    "runs/export/model_directory.py": "writes an export",
    "runs/export/export.py": "writes an export",
    "runs/export/forms.py": "copies a model that was made here, of a GGUF file or a run",
    "plugins/gguf/conversion.py": "what was checked when it was mapped",
    "plugins/gguf/export.py": "what an export has just written",
    "checkpoints/peft.py": "writes an export",
    "checkpoints/model_files.py": "writes an export, and what this package has made in a cache",
    "checkpoints/tensors.py": "writes a new file",
}
_OPENING = {"open", "read_text", "read_bytes", "copyfile", "copytree", "copy", "copy2"}
_OPENING |= {"write_text", "write_bytes"}


def test_nothing_else_opens_files_of_runs() -> None:
    package = Path(es_cookbook.__file__).parent
    found: set[str] = set()
    for room in ROOMS:
        for path in (package / room).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(call, ast.Call):
                    continue
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                of = getattr(getattr(call.func, "value", None), "id", "")
                if name in _OPENING and (name != "copy" or of == "shutil"):
                    found.add(path.relative_to(package).as_posix())
    folders = {name for name in OWN if not name.endswith(".py")}
    unknown = {each for each in found - OWN.keys() if not any(each.startswith(f) for f in folders)}
    assert unknown == set()
    assert {name for name in OWN if name.endswith(".py")} <= found
