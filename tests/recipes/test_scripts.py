"""The scripts that a user copies run as they stand."""

import runpy
import sys
from pathlib import Path

import pandas
import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.usefixtures("quick_python")
@pytest.mark.slow
def test_a_sweep_tries_every_combination_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        *(f"log_path={tmp_path}", "sigmas=0.002,0.004", "learning_rates=0.01"),
        *("base.num_generations=1", "base.optimizer.population_size=2"),
        *("base.dataset.num_train=8", "base.dataset.num_test=4"),
        "base.dataset.problems_per_generation=2",
    ]
    script = str(RECIPES / "sweep_countdown.py")
    monkeypatch.setattr(sys, "argv", [script, *options])
    runpy.run_path(script, run_name="__main__")
    table = pandas.read_parquet(tmp_path / "results.parquet")
    assert list(table["sigma"]) == [0.002, 0.004]
    assert all(table["state"] == "complete")
    assert all(table["final"].between(0, 1))
    out = capsys.readouterr().out
    assert "run 2 of 2" in out and "| 0.002 | 0.01 |" in out
    histories = sorted(tmp_path.glob("*/history.jsonl"))
    written = [history.stat().st_mtime_ns for history in histories]
    runpy.run_path(script, run_name="__main__")
    assert [history.stat().st_mtime_ns for history in histories] == written
