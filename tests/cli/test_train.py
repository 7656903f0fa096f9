"""`train`: from rows and a function to a run, and back from its directory."""

import functools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.said import refused, typed
from tests.tiny_run import write_tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
SMALL = ("num_generations=2", "optimizer.population_size=4", "sampling.max_tokens=4", "batch=2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the page says; several tests define a module of the same name."""
    rows, *_ = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    others = [{"question": f"{i}, {i + 1}?", "answer": str(i + 1)} for i in range(40)]
    lines = [rows, *(json.dumps(row) + "\n" for row in others)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (score,) = re.findall(r"```python\n(import re\n\n\ndef score.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(score)
    write_tiny_model(tmp_path / "model", context=128)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def line_of_the_page() -> list[str]:
    line, *_ = re.findall(r"^es-cookbook train (.*)$", PAGE, flags=re.MULTILINE)
    options = shlex.split(line)
    return [option for option in options if not option.startswith("model_name=")]


def test_a_new_task_runs_and_its_directory_is_enough_to_go_on_and_play(here: Path) -> None:
    done = typed("train", *line_of_the_page(), "model_name=model", *SMALL)
    assert done.returncode == 0, done.stderr
    (run,) = (here / "runs").iterdir()
    assert run.name.startswith("rows-seed0-")
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) == 3 and "reward/mean" in rows[0] and "test/reward/mean" in rows[2]
    trust = "trust=my_rewards.py"
    assert "my_rewards:score is not part of" in refused("resume", str(run), "num_generations=3")
    assert typed("resume", str(run), "num_generations=3", trust).returncode == 0
    assert len(list(read_history(run / "history.jsonl"))) == 3
    assert (
        "justthenumber." in typed("play", f"log_path={run}", trust, "problem=0").stdout
    )  # No spaces.


@pytest.mark.slow
def test_chosen_sizes_fit_into_the_minutes_and_can_be_pasted(here: Path) -> None:
    few = ["minutes=0.05", "optimizer.sigma=0.01", "optimizer.learning_rate=0.01"]
    options = [*line_of_the_page(), "model_name=model", *few]
    done = typed("train", *options, "log_path=run", "behavior_if_log_dir_exists=resume")
    assert done.returncode == 0, done.stderr
    said = done.stderr
    assert said.index("earns ") < said.index(" take about ")
    (chosen,) = re.findall(r"for minutes=0.05: (.*)", said)
    recorded = json.loads((here / "run/config.json").read_text())
    assert recorded["size"] == {"$tuple": []}
    for option in shlex.split(chosen):
        path, _, value = option.partition("=")
        found = functools.reduce(lambda part, name: part[name], path.split("."), recorded)
        assert str(found) == value or path == "num_generations"  # It follows the clock.
    length = f"num_generations={recorded['num_generations']}"
    assert len(list(read_history(here / "run/history.jsonl"))) == recorded["num_generations"]
    # The same command finds its run, and what was chosen makes the same run.
    done = typed("train", *options, "log_path=run", "behavior_if_log_dir_exists=resume")
    assert "is already complete" in done.stdout, done.stderr
    assert "for minutes=" not in done.stderr
    done = typed("train", *options, "log_path=again", "size=none", *shlex.split(chosen), length)
    assert done.returncode == 0, done.stderr
    again, before = (here / name / "history.jsonl" for name in ("again", "run"))
    assert again.read_bytes() == before.read_bytes()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("reward=my_rewards:scor", "has nothing called scor; did you mean 'score'?"),
        ("reward=score", ", and functions as my_module:name or path/to/script.py:name"),
        ("data=none.jsonl", "none.jsonl: there is no such file"),
        ("prompt={text}", "rows lack 'text', which dataset.prompt names"),
        ("prompt={text", "expected '}' before end of string; write {{ for a brace"),
        ("size=seed", "size=seed: accepted are optimizer.population_size, "),
        ("batch=1000", "dataset.problems_per_generation must be from 1 to "),
    ],
)
def test_a_mistyped_option_is_refused_in_one_sentence(here: Path, option: str, said: str) -> None:
    name = option.partition("=")[0]
    options = [given for given in line_of_the_page() if not given.startswith(f"{name}=")]
    done = typed("train", *options, "model_name=model", *SMALL[:3], option)
    assert done.returncode in (1, 2) and said in done.stderr.strip().splitlines()[-1]
    assert "loading" not in done.stderr  # A model, which may take minutes.
    assert not list((here / "runs").glob("*/history.jsonl"))


MIXED = (
    *("model_name=model", "dataset=mixture", "dataset.parts=arithmetic,rows"),
    *("dataset.parts.0.dataset.num_test=3", "dataset.parts.0.dataset.num_train=40"),
    *("dataset.parts.1.weight=30", "dataset.parts.1.dataset.source=rows.jsonl"),
    *("dataset.parts.1.dataset.reward=number", "dataset.parts.1.dataset.num_test=2"),
)


def test_recipes_and_rows_are_mixed_by_name(here: Path) -> None:
    small = (*SMALL[:3], "dataset.problems_per_generation=4")
    assert typed("train", *MIXED, *small, "log_path=mixed").returncode == 0
    (first, *_, last) = read_metrics(here / "mixed/metrics.jsonl")
    assert "test/env/arithmetic/correct" in first
    assert (last["test/problems"], first["data/share/rows"]) == (5.0, pytest.approx(30 / 70))
