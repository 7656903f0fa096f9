"""Short runs of the recipes of many turns."""

import importlib
from pathlib import Path

import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.runs.tracking.jsonl import read_metrics


@pytest.mark.parametrize(
    ("name", "metric"),
    [("guess_number", "turns"), ("calculator", "tool_calls"), ("search", "tool_calls")],
)
def test_a_run_of_two_generations(
    name: str, metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        *("num_generations=2", "optimizer.population_size=4", "dataset.problems_per_generation=2"),
        *("dataset.num_train=6", "dataset.num_test=3", "trackers=JsonlTrackerBuilder"),
        f"log_path={tmp_path / 'run'}",
    )
    module = importlib.import_module(f"es_cookbook.recipes.{name}.train_cli")
    run_cli(module.main, module.CLIConfig, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert {f"test/env/all/{metric}", "test/env/all/well_formed"} <= rows[-1].keys()
    assert rows[-1]["test/env/all/well_formed"] > 0.5
