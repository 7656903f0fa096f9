"""The command line of the recipe, a run of two generations, and the small model that it brings."""

from pathlib import Path

import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.math.train_cli import CLIConfig, main
from es_cookbook.runs.tracking.jsonl import read_metrics


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
