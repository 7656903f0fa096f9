"""A package from outside of the repository, installed as any other, wherever parts are named."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from es_cookbook.common import registry
from es_cookbook.runs.history.store import read_history
from tests.said import typed
from tests.tiny_run import write_tiny_model

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "recipes/plugin_package"


def shell(*words: str) -> str:
    done = typed(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed it."""
    target = tmp_path_factory.mktemp("packages")
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source)  # setuptools writes beside what it builds.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return target


@pytest.fixture
def here(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a model, in a process that sees the package."""
    write_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{ROOT}")  # A sweep's own processes.
    registry.groups.cache_clear()
    yield tmp_path
    registry.groups.cache_clear()


TRAINS = (
    *("train", "model_name=model", "dataset=doubles", "dataset.largest=40", "optimizer=hill"),
    *("engine=narrow", "num_generations=3", "sampling.max_tokens=4", "optimizer.population_size=4"),
)


def test_its_parts_are_chosen_recorded_shown_and_go_on(here: Path) -> None:
    shell(*TRAINS, "log_path=run")
    config = json.loads((here / "run/config.json").read_text())
    parts = [config[name]["$class"] for name in ("optimizer", "engine", "dataset")]
    assert parts == [
        "es_hill.optimizer:HillClimb",
        "es_hill.engine:NarrowEngineBuilder",
        "es_hill.dataset:Doubles",
    ]
    shell("resume", "run", "num_generations=4")  # What is installed is trusted.
    assert len(list(read_history(here / "run/history.jsonl"))) == 4
    assert "hill" in shell("show", "run").lower()
    assert len(shell("steps", "log_path=run").splitlines()) == 4


def test_it_is_swept(here: Path) -> None:
    shell("sweep", "recipe=train", "log_path=swept", *TRAINS[1:], "values.optimizer.step=0.2,0.5")
    configs = map(json.loads, (p.read_text() for p in (here / "swept").glob("*/config.json")))
    found = {config["optimizer"]["step"] for config in configs}
    assert found == {0.2, 0.5}


def test_help_and_lists_have_it(here: Path) -> None:
    page = shell("train", "--help", "optimizer=hill", "dataset=doubles", "engine=narrow")
    for entry in ("optimizer.step=0.5", "dataset.largest=200", "engine.max_batch_size=8"):
        assert entry in page
    assert re.search(r"\[es\|.*\bhill\b", " ".join(page.split()))
    assert "  steps              print how far each step of a run moved its centre" in shell(
        "--help"
    )
    assert "es-hill 1.0\n  commands:        steps\n" in shell("plugins")


def test_without_it_a_run_says_what_is_missing(
    here: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell(*TRAINS, "log_path=left")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(packages)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "es_hill"]:
        monkeypatch.delitem(sys.modules, name)
    registry.groups.cache_clear()
    done = typed("resume", "left", "num_generations=9")
    sentence = r"es_hill\.\w+:\w+ is not part of es_cookbook, but of es_hill"
    assert re.search(sentence, done.stderr)
    assert "unknown command 'steps'" in typed("steps").stderr
    assert (here / "left/history.jsonl").exists()


def test_the_page_shows_the_beginning_of_its_metadata() -> None:
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert (PACKAGE / "pyproject.toml").read_text(encoding="utf-8").startswith(shown)
    assert len([line for line in shown.splitlines() if line]) <= 20
