"""`train environment=...`: from an installed package to a run, and back from its directory."""

import json
import sys
from pathlib import Path

import pytest

from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.chat_templates import CHATML, tokenizer_with
from tests.said import refused, typed
from tests.tiny_run import write_tiny_model

pytestmark = pytest.mark.xdist_group("verifiers")

SMALL = (
    *("num_generations=2", "optimizer.population_size=4", "sampling.max_tokens=4", "batch=2"),
    "dataset.num_test=2",
)
OPTIONS = (*SMALL, "model_name=model")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a tiny model that knows chats."""
    tokenizer = tokenizer_with(CHATML)
    write_tiny_model(tmp_path / "model", vocab_size=len(tokenizer), context=512)
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_package_trains_and_its_directory_is_enough_to_go_on_and_play(here: Path) -> None:
    done = typed("train", *OPTIONS, "environment=es_guess", "dataset.chat.max_turns=3")
    assert done.returncode == 0, done.stderr
    (run,) = (here / "runs").iterdir()
    assert run.name.startswith("es_guess-seed0-")
    rows = read_metrics(run / "metrics.jsonl")
    assert "reward/mean" in rows[0] and "env/all/reward_near" in rows[0]
    assert "test/reward/mean" in rows[2] and "env/all/found" in rows[0]
    turns = [
        json.loads(line).get("turns", [])
        for line in (run / "rollouts.jsonl").read_text().splitlines()
    ]
    assert any("added" in turn for rollout in turns for turn in rollout)
    # Whose package it is, the run does not decide.
    assert "add trust=es_guess" in refused("resume", f"log_path={run}", "num_generations=3")
    trusted = (f"log_path={run}", "trust=es_guess")
    assert typed("resume", *trusted, "num_generations=3").returncode == 0
    assert len(list(read_history(run / "history.jsonl"))) == 3
    played = typed("play", *trusted, "problem=0").stdout
    assert played.startswith("test problem 0 (es_guess, task ")
    assert "reward_near" in typed("evaluate", *trusted).stdout
    model = ("environment=es_guess", "model_name=model", *SMALL[2:])
    assert "reward_near" in typed("evaluate", *model).stdout


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["environment=es_not_there"], 1, "it must be installed, or a module in this directory"),
        (["environment=prolog:es_guess"], 2, "unknown name 'prolog'"),
        (["environment=es_sums", 'dataset.options={"id": "os"}'], 1, "object, without an id"),
    ],
)
@pytest.mark.usefixtures("here")
def test_mistakes_are_told_in_one_sentence(options: list[str], code: int, says: str) -> None:
    done = typed("train", *options, "model_name=model", "num_generations=1")
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == code and says in said and "Traceback" not in said


def test_a_taskset_in_the_current_directory_is_found(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (Path(__file__).parent / "tasksets/es_sums.py").read_text()
    (here / "es_mine.py").write_text(source)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(here))])
    done = typed("train", *OPTIONS, "environment=es_mine")
    assert done.returncode == 0, done.stderr
    (run,) = (here / "runs").iterdir()
    assert run.name.startswith("es_mine-seed0-")
