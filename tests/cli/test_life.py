"""What every command does with every kind of run directory: the table of life.md.

A run that can be read is never changed by a command that only reads, a refusal changes nothing, and
whatever is done, no recorded line is lost.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from es_cookbook.common.errors import HistoryError
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.schedules import Cosine
from es_cookbook.runs.directory.directory import RunLock
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import run as run_config
from tests.said import after_start, typed
from tests.tiny_run import TinyConfig, write_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests/cli/life.md").read_text(encoding="utf-8")
FILES = ("config.json", "history.jsonl", "metrics.jsonl", "rollouts.jsonl")
COMMANDS = {
    "resume": [],
    "resume, longer": ["num_generations=4"],
    "fork": ["generation=1"],
    "rewind": ["generation=1"],
    "play": ["generation=1", "problem=0"],
    "evaluate": ["generation=1"],
    "export": ["generation=1"],
}


@dataclass(frozen=True)
class Kind:
    """A kind of run directory.

    Attributes:
        make: from what was trained, the directory, as the user has it.
        options: what the user adds; by command, or "" for all but `rewind`.
        said: what a refusal says; by command, or "" for all others.
    """

    make: Callable[[Path, Path], None]
    options: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    locked: bool = False


def changed(
    *changes: Callable[[Path], object], of: str = "finished"
) -> Callable[[Path, Path], None]:
    def make(trained: Path, to: Path) -> None:
        shutil.copytree(trained / of, to)
        for change in changes:
            change(to)

    return make


def cut(name: str, keep: int) -> Callable[[Path], object]:
    """Keep so many lines of a file."""

    def change(path: Path) -> None:
        lines = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(b"".join(lines[:keep]))

    return change


def replaced(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        text = (path / name).read_text()
        assert re.search(old, text), (name, old)
        (path / name).write_text(re.sub(old, new, text, count=1))

    return change


def without(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def moved(path: Path) -> None:
    shutil.move(path.parent / "model", path.parent / "elsewhere")


def other_weights(path: Path) -> None:
    weights = path.parent / "model/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def history_of(other: str) -> Callable[[Path, Path], None]:
    def make(trained: Path, to: Path) -> None:
        shutil.copytree(trained / "finished", to)
        shutil.copy(trained / other / "history.jsonl", to)

    return make


def model_directory(trained: Path, to: Path) -> None:
    shutil.copytree(trained / "model", to)


TRAINED_ELSEWHERE = replaced(
    "config.json",
    r'"engine": \{[^}]*\}',
    '"engine": {"$class": "es_cookbook.engines.vllm.engine:VLLMEngineBuilder"}',
)
MOVED = {"": "model_name={model}", "fork": ""}
NO_RUN = {"": "is not a run directory: its config.json "}
LOST = {"": "history.jsonl is missing, but metrics.jsonl"}
DAMAGED = {"": "line 4 is damaged"}
UNREADABLE = {"": "config.json", "resume": "must be JSON; this is not JSON"}
KINDS = {
    "no generation recorded yet": Kind(
        changed(cut("history.jsonl", 1), cut("metrics.jsonl", 1), cut("rollouts.jsonl", 4)),
        said={"": "generation 1", "fork": "0 to 0", "rewind": "0 to 0", "export": "0 to 0"},
    ),
    "interrupted": Kind(changed(of="interrupted")),
    "finished": Kind(changed(of="finished")),
    "finished, with a schedule that depends on its length": Kind(
        changed(of="scheduled"), said={"": "fork log_path={path} generation=3 output={path}-longer"}
    ),
    "forked": Kind(changed(of="forked")),
    "rewound, and its previous state (`rewound/1`)": Kind(changed(of="rewound/rewound/1")),
    "from a script": Kind(changed(of="scripted"), said={"": "or trust=path/to/life_"}),
    "from a script, with `trust=`": Kind(changed(of="scripted"), {"": "trust=tests,{script}"}),
    "from another engine, with `engine=`": Kind(
        changed(TRAINED_ELSEWHERE, of="interrupted"),
        dict.fromkeys(("resume", "resume, longer", "play", "evaluate"), "engine=torch"),
    ),
    "base model moved": Kind(
        changed(moved, of="interrupted"),
        said={"": "model_name: there is no directory '{path.parent}/model'"},
    ),
    "base model moved, with `model_name=`": Kind(changed(moved, of="interrupted"), MOVED),
    "base model changed": Kind(
        changed(other_weights, of="interrupted"), said={"": "began with model_name="}
    ),
    "in progress": Kind(
        changed(of="interrupted"), said={"": "is being written by process"}, locked=True
    ),
    "`history.jsonl` missing": Kind(changed(without("history.jsonl")), said=LOST),
    "`history.jsonl` shorter than `metrics.jsonl`": Kind(
        changed(cut("history.jsonl", 3)), said={"": "to continue from what it holds: "}
    ),
    "`history.jsonl` torn at its end": Kind(
        changed(
            lambda path: (path / "history.jsonl").write_bytes(
                (path / "history.jsonl").read_bytes()[:-9]
            ),
            of="interrupted",
        )
    ),
    "`history.jsonl` damaged after generation 2": Kind(
        changed(replaced("history.jsonl", r'"generation":2,', '"generation":7,'), of="longer"),
        said=DAMAGED,
    ),
    "`history.jsonl` from another run with the same base": Kind(
        history_of("other"), said={"": "the recorded fitness does not give the recorded step"}
    ),
    "`metrics.jsonl` or `rollouts.jsonl` missing": Kind(
        changed(without("metrics.jsonl"), without("rollouts.jsonl"), of="interrupted")
    ),
    "`metrics.jsonl` damaged": Kind(
        changed(
            replaced("metrics.jsonl", r'"progress/generation": 0', '"progress/generation": x'),
            replaced("rollouts.jsonl", r'"generation": 1', "generation"),
            of="interrupted",
        ),
        said={"": "metrics.jsonl, line 1 is damaged: "},
    ),
    "`config.json` missing": Kind(changed(without("config.json")), said=NO_RUN),
    "`config.json` damaged": Kind(
        changed(replaced("config.json", r'"dataset": \{', '"dataset": [{')), said=UNREADABLE
    ),
    "of another version": Kind(
        changed(replaced("config.json", r'"\$format": 1', '"$format": 2')),
        said={"": "config.json: it has format version 2, and this es_cookbook reads 1"},
    ),
    "a model, not a run": Kind(model_directory, said={"": "config.json does not describe a run"}),
}
"""Rows of the table."""

SCRIPT = """
import chz
from es_cookbook import Config, run
from tests.fakes import SmallDatasetBuilder
from tests.tiny_run import TinyConfig

@chz.chz
class Problems(SmallDatasetBuilder):
    pass
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of three generations as they come about."""
    path = tmp_path_factory.mktemp("trained")
    model = write_tiny_model(path / "model")

    def config(name: str, **fields: object) -> TinyConfig:
        settings = {"num_generations": 3, "eval_every": 0} | fields
        return TinyConfig(model_name=str(model), log_path=str(path / name), **settings)  # pyright: ignore[reportArgumentType]

    # It shows in no recorded step, and a longer run was taken for the same.
    cosine = ES(population_size=4, sigma=0.1, learning_rate=0.05, sigma_schedule=Cosine())
    run_config(config("finished"))
    run_config(config("other", seed=1))
    run_config(config("scheduled", optimizer=cosine))
    run_config(config("longer", num_generations=4))
    shutil.copytree(path / "finished", path / "rewound")
    forked, finished = f"{path}/forked", f"{path}/finished"
    typed("fork", finished, f"output={forked}", "generation=2", "seed=2", "trust=tests")
    typed("resume", forked, "trust=tests")
    typed("rewind", f"{path}/rewound", "generation=2")
    shutil.copytree(path / "rewound", path / "interrupted")
    shutil.rmtree(path / "interrupted/rewound")
    shutil.copytree(path / "interrupted", path / "scripted")
    (path / "life_script.py").write_text(SCRIPT)
    dataset = '"tests.fakes:SmallDatasetBuilder"'
    replaced("config.json", dataset, '"life_script:Problems"')(path / "scripted")
    yield path
    sys.modules.pop("life_script", None)


def tree(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def recorded_lines(path: Path) -> set[bytes]:
    """The lines of generations that count, in every file, and the Config's."""
    if not (path / "config.json").exists() or not (path / "history.jsonl").exists():
        return set()
    generations: list[int] = []
    try:
        generations += [record.generation for record in read_history(path / "history.jsonl")]
    except HistoryError:
        return set((path / "history.jsonl").read_bytes().splitlines())
    if not generations:
        return set()
    lines = set((path / "history.jsonl").read_bytes().splitlines()[: 1 + len(generations)])
    for name, key in (("metrics.jsonl", "progress/generation"), ("rollouts.jsonl", "generation")):
        for line in (path / name).read_bytes().splitlines() if (path / name).exists() else ():
            try:
                lines |= {line} if json.loads(line)[key] < len(generations) else set()
            except ValueError:
                lines.add(line)
    return lines


def one_sentence(said: str) -> str:
    """A refusal, without what the command says before of what it does."""
    (sentence,) = after_start(said).strip().splitlines()
    return sentence


def rows_of_the_page() -> dict[str, dict[str, str]]:
    (table,) = re.findall(r"(?m)^\| run directory \|.*\n\|[-|]*\|\n((?:\|.*\n)+)", PAGE)
    cells = [[cell.strip() for cell in row.strip(" |").split(" | ")] for row in table.splitlines()]
    return {row[0]: dict(zip(COMMANDS, row[1:], strict=True)) for row in cells}


def test_the_page_has_every_kind_of_run_directory() -> None:
    assert list(rows_of_the_page()) == list(KINDS)


@pytest.mark.daily
@pytest.mark.parametrize("name", KINDS)
def test_every_command_does_what_the_page_says(name: str, trained: Path, tmp_path: Path) -> None:
    said_of = rows_of_the_page()[name]
    kind = KINDS[name]
    for number, (command, options) in enumerate(COMMANDS.items()):
        home = tmp_path / str(number)
        shutil.copytree(trained / "model", home / "model")
        path, output = home / "run", home / "output"
        kind.make(trained, path)
        places = {"path": path, "model": home / "elsewhere", "script": trained / "life_script.py"}
        at_home = replaced("config.json", re.escape(f'{trained}/model"'), f'{home}/model"')
        if (path / "config.json").exists() and name != "a model, not a run":
            at_home(path)
        added = kind.options.get(command, kind.options.get("", "")).format(**places)
        own = [added] if added and command != "rewind" else []
        if command not in ("rewind", "export") and "trust=" not in added:
            own.append("trust=tests")
        own += [f"output={output}"] if command in ("fork", "export") else []
        before = tree(path)
        lines = recorded_lines(path)
        holder = RunLock(path) if kind.locked else None
        done = typed(command.partition(",")[0], f"log_path={path}", *options, *own)
        if holder:
            holder.release()
        where = f"{command} of {name}: {done.stdout}{done.stderr}"
        after = tree(path)
        if said_of[command] == "refused":
            expected = kind.said.get(command, kind.said.get("", "!")).format(**places)
            assert done.returncode == 1 and expected in one_sentence(done.stderr), where
            assert after == before and not output.exists(), where
            continue
        assert done.returncode == 0, where
        if command in ("fork", "play", "evaluate", "export") or said_of[command] == "complete":
            assert after == before, where
        left = b"\n".join(after.values())
        assert all(line in left for line in lines), where
        match said_of[command]:
            case "complete":
                assert "is already complete" in done.stdout, where
            case "continues" | "starts":
                length = 4 if command == "resume, longer" else 3
                assert len(list(read_history(path / "history.jsonl"))) == length, where
                kept = json.loads((path / "config.json").read_text())
                begun = json.loads(before["config.json"]) | {"num_generations": length}
                assert said_of[command] == "starts" or kept == begun
            case "works" if command == "fork":
                assert len(list(read_history(output / "history.jsonl"))) == 1, where
            case "works" if command == "rewind":
                assert len(list(read_history(path / "history.jsonl"))) == 1, where
            case "works" if command == "export":
                assert (output / "model.safetensors").is_file(), where
            case "works" if command == "evaluate":
                assert "run after 1 generation\n4 held-out problems, " in done.stdout, where
            case "works":
                assert command == "play" and "answer (" in done.stdout, where
            case other:
                raise AssertionError(f"{other!r} is no word of the table")
