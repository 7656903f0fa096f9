"""The command line of the recipe, a run of two generations, and the small model that it brings."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.math import warm_start
from es_cookbook.recipes.math.dataset import MathDatasetBuilder
from es_cookbook.recipes.math.train_cli import RECIPE, CLIConfig, main
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.train.program import default_log_path


def parsed(*options: str) -> CLIConfig:
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    return seen[0]


def test_the_config_round_trips_through_json() -> None:
    config = parsed("dataset.prompt=boxed", "dataset.grading=math", "optimizer.sigma=0.02")
    again = config_from_json(config_to_json(config))
    assert type(again) is CLIConfig
    assert again == config
    assert isinstance(config.dataset, MathDatasetBuilder)
    assert (config.dataset.prompt, config.dataset.grading) == ("boxed", "math")
    assert default_log_path(config, "math").startswith("runs/math-seed0-")


def test_a_run_of_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = (
        f"log_path={run}",
        *("num_generations=2", "optimizer.population_size=4", "trackers=JsonlTrackerBuilder"),
        *("dataset.problems_per_generation=2", "dataset.num_train=6", "dataset.num_test=20"),
    )
    run_cli(main, CLIConfig, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    rows = read_metrics(run / "metrics.jsonl")
    assert all({"env/all/correct", "env/all/format"} <= row.keys() for row in rows[:2])
    assert 0.2 < rows[0]["test/env/all/correct"] < 0.9, "the bundled model half knows the task"
    assert rows[0]["test/env/all/answered"] > 0.98


def test_the_bundled_model_is_small() -> None:
    assert sum(path.stat().st_size for path in RECIPE.model.iterdir()) < 1_000_000


def test_the_warm_start_writes_a_model_that_the_recipe_loads(tmp_path: Path) -> None:
    output = tmp_path / "model"
    small = {"num_problems": 8, "steps": 2, "batch_size": 2}
    warm_start.main(warm_start.Config(output=str(output), **small))
    assert AutoModelForCausalLM.from_pretrained(output).num_parameters() < 250_000
    with pytest.raises(ConfigError, match="output must be a new directory"):
        warm_start.main(warm_start.Config(output=str(output)))
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        warm_start.Config(output="x", steps=0)
