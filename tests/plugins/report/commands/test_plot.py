"""Curves are drawn from run directories; what a run has not measured is refused."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.plugins.report.commands.plot import Plot, main
from es_cookbook.plugins.report.curve_names import grouped
from es_cookbook.plugins.report.plots import lines_of
from es_cookbook.runs.tracking.curves import points
from es_cookbook.runs.tracking.reading import read_run
from tests.runs.directory.test_damaged_directories import RUNS
from tests.said import refused

CORRECT = "test/env/all/correct"


def run_with(path: Path, values: Mapping[str, Any], *, plus: float = 0.0) -> Path:
    """A copy of a recorded run with other values in its config.json, by dotted path."""
    shutil.copytree(RUNS[0], path)
    plain = json.loads((path / "config.json").read_text())
    for dotted, value in values.items():
        *parts, last = dotted.split(".")
        place = plain
        for part in parts:
            place = place[part]
        place[last] = value
    (path / "config.json").write_text(json.dumps(plain))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [
        json.dumps({**row, CORRECT: row[CORRECT] + plus}) if CORRECT in row else json.dumps(row)
        for row in rows
    ]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


def test_runs_that_differ_in_their_seed_are_one_curve_with_a_range(tmp_path: Path) -> None:
    paths = [
        run_with(tmp_path / "a", {"seed": 0, "log_path": "a"}),
        run_with(tmp_path / "b", {"seed": 1, "log_path": "b"}, plus=0.25),
        run_with(tmp_path / "c", {"optimizer.sigma": 0.5}),
    ]
    groups = grouped([read_run(path) for path in paths])
    sigma = json.loads((RUNS[0] / "config.json").read_text())["optimizer"]["sigma"]
    assert {name: len(runs) for name, runs in groups.items()} == {
        f"ES, sigma={sigma}": 2,
        "ES, sigma=0.5": 1,
    }
    line = lines_of(groups, CORRECT, "rollouts", 100)[f"ES, sigma={sigma}"]
    low, high = line.values_R_M
    assert [b - a for a, b in zip(low, high, strict=True)] == pytest.approx([25.0] * len(low))
    log_path = tuple(map(str, paths))
    main(Plot(log_path=log_path, output=str(tmp_path / "plots/it.svg")))
    assert (tmp_path / "plots/it.png").read_bytes().startswith(b"\x89PNG")
    shown = (tmp_path / "plots/it.svg").read_text()
    for words in ("Countdown, mean and range of 2 seeds", "ES, sigma=0.5", "training rollouts"):
        assert f"<!-- {words} -->" in shown


def test_a_held_out_metric_stands_at_what_was_spent_before_it(tmp_path: Path) -> None:
    run = read_run(RUNS[0])
    spent = [row["progress/rollouts"] for row in run.metrics]
    assert list(points(run, "reward/mean", "rollouts")) == spent[: len(run.records)]
    held_out = points(run, CORRECT, "rollouts")
    assert min(held_out) == 0
    assert max(held_out) == spent[-1]
    seconds = list(points(run, CORRECT, "seconds"))
    total = math.fsum(row.get("time/total", 0.0) for row in run.metrics)
    assert seconds[-1] == pytest.approx(total)


def test_what_was_not_measured_is_refused_with_the_nearest(tmp_path: Path) -> None:
    said = refused("plot", f"log_path={RUNS[0]}", "metric=reward/meen", f"output={tmp_path}/x")
    assert "has not measured reward/meen over rollouts: did you mean 'reward/mean'?" in said
    assert "must be a run directory" in refused("plot", f"log_path={tmp_path}/none")
    assert "log_path must name at least one" in refused("plot", "log_path=")
