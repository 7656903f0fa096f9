"""Plots are drawn from files as they were written, and refuse what does not have what is drawn."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from es_cookbook.plugins.report.commands.plot import Plot, main, read_study
from es_cookbook.plugins.report.plots import lines_of
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.curves import grouped, points
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from es_cookbook.runs.tracking.reading import read_run
from tests.runs.directory.test_damaged_directories import RUNS
from tests.said import refused, typed
from tests.tiny_run import TinyConfig, write_tiny_model

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
    shown = plotted(tmp_path, [str(path) for path in paths])
    for words in ("Countdown, mean and range of 2 seeds", "ES, sigma=0.5", "training rollouts"):
        assert f"<!-- {words} -->" in shown


def plotted(tmp_path: Path, log_paths: list[str], **options: Any) -> str:
    """The text of the SVG; the PNG lies beside it."""
    main(Plot(log_path=tuple(log_paths), output=str(tmp_path / "plots" / "it.svg"), **options))
    assert (tmp_path / "plots" / "it.png").read_bytes().startswith(b"\x89PNG")
    return (tmp_path / "plots" / "it.svg").read_text()


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
    assert "is no evaluation" in refused("plot", f"{RUNS[0]}/config.json", "kind=pass_at_k")


STUDY = {
    "runs": {
        "runs/\x1b[31mevil": {
            "markovian": True,
            "leaks": {"value": 0.1, "low": 0.0, "high": 0.2},
            **{
                f"fragility/{damage}/{percent}": {
                    "value": percent / 100,
                    "low": percent / 200,
                    "high": None if percent == 100 else percent / 50,
                }
                for damage in ("delete", "digits")
                for percent in (0, 20, 100)
            },
        }
    }
}


def test_a_study_is_drawn_by_damage_and_several_by_run(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "study.json").write_text(json.dumps(STUDY))
    (lost,) = read_study(one).values()
    assert lost["delete"][20.0] == (0.2, 0.1, 0.4)
    text = plotted(tmp_path, [str(one)], kind="fragility")
    assert "<!-- delete -->" in text and "<!-- digits -->" in text
    assert "Markovian, damaged thoughts" in text and "\x1b" not in text
    other = tmp_path / "other.json"
    other.write_text(json.dumps(STUDY).replace("evil", "good"))
    text = plotted(tmp_path, [str(one), str(other)], kind="fragility")
    assert "good -->" in text and "<!-- delete -->" not in text


@pytest.mark.parametrize("there", ["", "[]", '{"runs": {"a": {"fragility/delete/0": {}}}}', "{}"])
def test_a_file_that_is_no_study_is_refused(tmp_path: Path, there: str) -> None:
    (tmp_path / "study.json").write_text(there)
    options = (f"log_path={tmp_path}", "kind=fragility", f"output={tmp_path}/x")
    assert "study.json is no study" in refused("plot", *options)


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    model = write_tiny_model(path / "model")
    config = TinyConfig(
        model_name=str(model),
        log_path=str(path / "run"),
        num_generations=2,
        trackers=JsonlTrackerBuilder(),
    )
    anyio.run(train, config)
    return path / "run"


def test_pass_at_k_is_drawn_from_evaluations_with_several_attempts(
    real_run: Path, tmp_path: Path
) -> None:
    def evaluated(*options: str) -> str:
        output = tmp_path / f"{len(options)}.json"
        typed("evaluate", str(real_run), f"output={output}", "trust=tests", *options)
        return str(output)

    several = evaluated("attempts=2", "temperature=1", "metric=correct")
    text = plotted(tmp_path, [several], kind="pass_at_k")
    assert "pass@k -->" in text and "after 2 generations -->" in text
    options = (f"log_path={evaluated()}", "kind=pass_at_k", f"output={tmp_path}/x")
    assert "it needs several attempts" in refused("plot", *options)
