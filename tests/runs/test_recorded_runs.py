"""Runs of an earlier version resume, replay and export to the same bits.

`tests/data/recorded` was written before the package was divided into rooms, so its `config.json`s
name classes where they were then.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.cli.export import ExportConfig
from es_cookbook.cli.export import main as export
from es_cookbook.cli.resume import Resume
from es_cookbook.cli.resume import main as resume
from es_cookbook.common.configs import config_from_json, config_to_json, load_config
from es_cookbook.runs.config import Config
from es_cookbook.runs.history.store import read_history

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/data/recorded"

EXPORTS = {
    "low_rank": (
        "model.safetensors",
        "c2a429c873b4fe24ceb82f3288d61710e143efe04e3aae556ad3443fdd6d3a35",
    ),
    "full_rank": (
        "model.safetensors",
        "f574b5643941a72d16040204008ad009ae65609828a55fe76ee4367061d9da9b",
    ),
    "adapter": (
        "adapter_model.safetensors",
        "f781015e4f889dee5e8dfe6b4db33328fb7ef9669e96f1721e6f5d43858fe19e",
    ),
}
"""Run -> what was exported of it then, and its SHA-256."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recorded runs, where the paths in their configs lead to the same files."""
    for path in ("es_cookbook", "tests/data/base"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(ROOT / path, tmp_path / path)
    shutil.copytree(RECORDED, tmp_path / "tests/data/recorded")
    monkeypatch.chdir(tmp_path)
    return Path("tests/data/recorded")


@pytest.mark.parametrize("name", EXPORTS)
def test_a_recorded_run_is_exported_to_the_same_bytes(name: str, runs: Path) -> None:
    export(ExportConfig(log_path=str(runs / name), output="exported"))
    file, digest = EXPORTS[name]
    assert hashlib.sha256((Path("exported") / file).read_bytes()).hexdigest() == digest


def rollouts_of(run: Path) -> dict[tuple[int, ...], dict[str, Any]]:
    """The lines of a run's `rollouts.jsonl`, by generation, problem, genome and attempt."""
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").open()]
    for turn in (turn for line in lines for turn in line["turns"]):
        turn["prompt"] = turn["prompt"].replace(" ", "")  # Once written between its letters.
    names = ("generation", "problem", "genome", "attempt")
    return {tuple(line[name] for name in names): line for line in lines}


@pytest.mark.parametrize("name", EXPORTS)
def test_a_recorded_run_is_restored_and_goes_on(name: str, runs: Path) -> None:
    # The generations to come sample a model, and kernels of other CPUs may round otherwise.
    history = runs / name / "history.jsonl"
    lines = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(b"".join(lines[:3]))
    resume(Resume(log_path=str(runs / name)), {})
    resumed = history.read_bytes().splitlines(keepends=True)
    assert resumed[:3] == lines[:3] and len(resumed) == len(lines)
    before, after = (list(read_history(path)) for path in (RECORDED / name / history.name, history))
    assert [[term.seed for term in record.step.terms] for record in after] == [
        [term.seed for term in record.step.terms] for record in before
    ]


def test_a_recorded_run_goes_on_to_the_same_bytes(runs: Path) -> None:
    # Its engine is a fake and its optimizer remembers what genomes did, problem by problem.
    whole = {path.name: path.read_bytes() for path in (runs / "genetic").iterdir()}
    rollouts = rollouts_of(runs / "genetic")
    history = runs / "genetic/history.jsonl"
    history.write_bytes(b"".join(whole["history.jsonl"].splitlines(keepends=True)[:4]))
    resume(Resume(log_path=str(runs / "genetic"), trust=("tests",)), {})
    assert history.read_bytes() == whole["history.jsonl"]
    # Which of a generation's rollouts are written down is not what the run is, and has changed.
    again = rollouts_of(runs / "genetic")
    assert len(again) == len(rollouts)
    assert len(both := [place for place in again if place in rollouts]) >= 6
    assert all(again[place] == rollouts[place] for place in both)


@pytest.mark.parametrize("path", sorted(RECORDED.rglob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_config_is_read_and_written_again(path: Path) -> None:
    config = load_config(path, Config, ["tests", "hub:me/run"])
    assert config_from_json(config_to_json(config), ["tests", "hub:me/run"]) == config
