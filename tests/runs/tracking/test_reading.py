"""Looking at run directories: all that can be read, and a sentence for what cannot."""

import json
import shutil
from pathlib import Path

import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.runs.directory.directory import RunLock
from es_cookbook.runs.tracking.reading import read_run
from tests.runs.directory.test_damaged_directories import RUNS

RUN = RUNS[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(RUN, tmp_path / "run")
    return tmp_path / "run"


def add_line(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)


def test_a_whole_run_is_read(run: Path) -> None:
    found = read_run(run)
    assert found.state == "complete"
    assert found.generations_done == found.num_generations == len(found.records)
    assert len(found.metrics) == found.num_generations + 1
    assert found.config["optimizer"] == "es_cookbook.evolution.optimizers.es:ES"
    assert found.config["optimizer.sigma"] == json.loads((run / "config.json").read_text())[
        "optimizer"
    ].get("sigma")
    assert found.header is not None
    assert len({rollout["generation"] for rollout in found.rollouts()}) == found.num_generations
    assert found.problems == ()
    assert not found.is_gradient


def test_what_is_torn_is_left_out(run: Path) -> None:
    for name in ("history.jsonl", "metrics.jsonl", "rollouts.jsonl"):
        add_line(run / name, b'{"generation": 9')
    whole, found = read_run(RUN), read_run(run)
    assert (found.metrics, found.records) == (whole.metrics, whole.records)
    assert list(found.rollouts()) == list(whole.rollouts())


def test_damage_is_told_and_the_rest_read(run: Path) -> None:
    for line in (b"\xff\xfe\n", b'{"reward/mean": "high"}\n', b"[" * 100_000 + b"\n"):
        add_line(run / "metrics.jsonl", line)
    add_line(run / "rollouts.jsonl", b"[1, 2]\n")
    (run / "history.jsonl").write_bytes(b'{"version":99}\n{"version":99}\n')
    found, said = read_run(run), list[str]()
    assert len(found.metrics) == found.num_generations + 1
    assert found.records == []
    rollouts = list(found.rollouts(said.append))
    assert rollouts == list(read_run(RUN).rollouts())
    (problem,) = said
    assert "rollouts.jsonl, line " in problem and "it has no generation" in problem
    assert [
        str(run / name) in text
        for name, text in zip(
            ("metrics.jsonl", "metrics.jsonl", "history.jsonl"), found.problems, strict=True
        )
    ] == [True] * 3
    assert "2 more damaged lines left out" in found.problems[1]


def test_a_run_without_its_config_is_shown_for_what_it_measured(run: Path) -> None:
    (run / "config.json").unlink()
    found = read_run(run)
    assert found.metrics and found.state == "interrupted"
    assert found.problems == (f"{run / 'config.json'} is missing",)


def test_gradients_have_no_history(run: Path) -> None:
    (run / "history.jsonl").unlink()
    (run / "checkpoints").mkdir()
    found = read_run(run)
    assert found.is_gradient and found.state == "complete"
    assert found.generations_done == found.num_generations


def test_a_run_is_running_while_its_writer_lives(run: Path) -> None:
    lock = RunLock(run)
    assert read_run(run).state == "running"
    lock.release()
    assert read_run(run).state == "complete"


@pytest.mark.parametrize("kind", ["nothing", "file", "empty", "model", "foreign"])
def test_what_is_no_run_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("{}")
    elif kind != "nothing":
        path.mkdir()
    if kind == "model":
        (path / "config.json").write_text('{"model_type": "qwen2"}')
    if kind == "foreign":
        (path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="run directory"):
        read_run(path)
