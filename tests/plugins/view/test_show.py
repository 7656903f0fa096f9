"""A run's summary says what it is and what it reached, also where the run is damaged."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runs.directory.test_damaged_directories import RUNS
from tests.said import refused, typed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(RUNS[0], tmp_path / "run")
    return tmp_path / "run"


def shown(log_path: Path) -> dict[str, list[str]]:
    """Title of a section -> its lines; the head has none."""
    head, *others = typed("show", str(log_path)).stdout.strip().split("\n\n")
    sections = {"": head.splitlines()}
    for section in others:
        title, *lines = section.splitlines()
        sections[title] = [line.strip() for line in lines]
    return sections


def test_a_summary_has_state_settings_and_gains(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["test/env/all/correct"] for row in rows if "test/env/all/correct" in row]
    found = shown(run)
    head = found[""]
    assert head[0] == str(run)
    assert head[1] == "Countdown, trained by evolution strategies: ES, LowRank"
    assert head[2].startswith("complete, generation ")
    settings = found["Config, where not the recipe's default"]
    assert any(line.split() == ["dataset.num_test", "4", "(default", "500)"] for line in settings)
    assert not any(line.startswith(("log_path", "trackers")) for line in settings)
    change = f"{held_out[0]:.3f} -> {held_out[-1]:.3f}"
    assert any(
        line.startswith("correct ") and change in line
        for line in found["held-out, before -> after"]
    )
    assert "could not be read" not in found


def test_held_out_values_have_an_interval_and_a_number_of_problems(run: Path) -> None:
    within = {"test/low/env/all/correct": 0.2, "test/high/env/all/correct": 0.5}
    row = {"progress/generation": 3, "test/env/all/correct": 0.33, "test/problems": 40, **within}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    lines = shown(run)["held-out, before -> after"]
    (line,) = [line for line in lines if line.startswith("correct ")]
    assert line.endswith("95 %: 0.200 to 0.500, 40 problems")


def test_unreadable_parts_are_listed_with_control_characters_escaped(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"progress/generation": 3, "test/env/all/\\u001b[2Jevil": 1.0}\n')
    with (run / "rollouts.jsonl").open("a") as file:
        file.write("[]\n")
    plain = json.loads((run / "config.json").read_text())
    plain["$class"] = "es_cookbook.recipes.nowhere\x1b[31m.train_cli:CLIConfig"
    plain["model_name"] = "\x1b]0;title\x07 model"
    (run / "config.json").write_text(json.dumps(plain))
    out = typed("show", str(run)).stdout
    assert "\x1b" not in out
    assert r"\x1b[2Jevil" in out and r"\x1b]0;title\x07 model" in out
    assert "it has no generation" in out.partition("could not be read")[2]


def test_a_run_without_config_is_shown_for_what_is_there(run: Path) -> None:
    (run / "config.json").unlink()
    found = shown(run)
    assert found[""][1] == "unknown task, trained by evolution strategies: ES"
    assert "/?" in found[""][2]
    assert found["could not be read"] == [f"{run / 'config.json'} is missing"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is not a run directory" in refused("show", f"log_path={tmp_path}")
