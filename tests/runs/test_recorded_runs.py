"""Recorded runs resume, replay and export to the same bits; a run of another version is refused."""

import hashlib
import json
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.__main__ import main
from es_cookbook.cli.export import ExportConfig
from es_cookbook.cli.export import main as export
from es_cookbook.cli.resume import Resume
from es_cookbook.cli.resume import main as resume
from es_cookbook.common.configs import config_from_json, config_to_json, load_config
from es_cookbook.runs.config import Config
from es_cookbook.runs.history.store import read_history
from tests.runs.records import cut_run
from tests.tiny_run import contents

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/data/recorded"

EXPORTS = {
    "low_rank": (
        "model.safetensors",
        "c2a429c873b4fe24ceb82f3288d61710e143efe04e3aae556ad3443fdd6d3a35",
    ),
    "full_rank": (
        "model.safetensors",
        "90089ba0e7b3bf3e48da36c5e519a2992fed683909dff8be827e182ece042126",
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
    names = ("generation", "problem", "genome", "attempt")
    return {tuple(line[name] for name in names): line for line in lines}


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.slow
def test_a_recorded_run_is_restored_and_goes_on(name: str, runs: Path) -> None:
    # The generations to come sample a model, and kernels of other CPUs may round otherwise.
    history = runs / name / "history.jsonl"
    lines = history.read_bytes().splitlines(keepends=True)
    cut_run(runs / name, 2)
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
    cut_run(runs / "genetic", 3)
    resume(Resume(log_path=str(runs / "genetic"), trust=("tests",)), {})
    assert history.read_bytes() == whole["history.jsonl"]
    assert rollouts_of(runs / "genetic") == rollouts


@pytest.mark.parametrize("path", sorted(RECORDED.rglob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_config_is_read_and_written_again(path: Path) -> None:
    config = load_config(path, Config, ["tests"])
    assert config_from_json(config_to_json(config), ["tests"]) == config


def of_before(name: str, runs: Path) -> Path:
    """A recorded run as it was written before version 1."""
    plain = json.loads((runs / name / "config.json").read_text())
    del plain["$format"]
    (runs / name / "config.json").write_text(json.dumps(plain))
    history = runs / name / "history.jsonl"
    lines: list[bytes] = []
    for line in history.read_bytes().splitlines():
        body = line.rpartition(b',"checksum":"')[0].replace(b'{"format":1,', b'{"version":2,')
        lines.append(body + b',"checksum":"%08x"}\n' % zlib.crc32(body))
    history.write_bytes(b"".join(lines))
    return runs / name


SAID = (
    "it was written before version 1 of es_cookbook's files; the last commit that reads it is "
    "cc874d88"
)


@pytest.mark.parametrize(
    "options",
    [
        ["resume", "RUN"],
        ["evaluate", "model_name=RUN@2", "recipe=countdown"],
        ["show", "RUN"],
        ["countdown", "log_path=RUN", "behavior_if_log_dir_exists=delete"],
    ],
    ids=" ".join,
)
def test_a_run_of_before_version_1_is_refused_in_one_sentence(
    options: list[str],
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = of_before("low_rank", runs)
    before = contents(run)
    monkeypatch.setattr(sys, "argv", ["", *(each.replace("RUN", str(run)) for each in options)])
    with pytest.raises(SystemExit):
        main()
    said = capfd.readouterr().err
    assert said.count(SAID) == 1 and f"{run}/config.json: {SAID}" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert contents(run) == before and not Path("new").exists()
