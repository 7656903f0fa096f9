"""Runs as tables: their columns, also of foreign runs, and that Parquet can hold them."""

import json
import logging
import shutil
from pathlib import Path

import pandas
import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.report.frames import Frames, frames, main, write_table
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics

RECORDED = Path(__file__).parents[2] / "data/recorded"
RUN = RECORDED / "low_rank"


def other(tmp_path: Path, name: str = "other", **optimizer: object) -> Path:
    """A copy of a run, of a Config that differs."""
    path = tmp_path / name
    shutil.copytree(RUN, path)
    config = json.loads((path / "config.json").read_text())
    config["optimizer"] |= optimizer
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_row_is_a_generation_of_a_run_with_what_its_config_has_of_its_own(tmp_path: Path) -> None:
    table = frames([RUN, other(tmp_path, sigma=0.5)])
    assert list(table.columns[:4]) == ["run", "generation", "seed", "optimizer.sigma"]
    assert list(table["generation"]) == [0, 1, 2, 3, 4] * 2
    assert list(table["run"].unique()) == [str(RUN), str(tmp_path / "other")]
    sigma = json.loads((RUN / "config.json").read_text())["optimizer"]["sigma"]
    assert list(table["optimizer.sigma"]) == [sigma] * 5 + [0.5] * 5
    rows, records = read_metrics(RUN / "metrics.jsonl"), list(read_history(RUN / "history.jsonl"))
    assert list(table["reward/mean"][:4]) == [row["reward/mean"] for row in rows[:4]]
    assert table["test/env/all/correct"][4] == rows[4]["test/env/all/correct"]
    assert table["history/fitness_G"][1] == list(records[1].fitness_G)
    assert table["history/fingerprint"][3] == f"{records[3].fingerprint:016x}"
    assert table["history/terms"][2] == len(records[2].step.terms)
    assert pandas.isna(table["reward/mean"][4]), "the last evaluation is no generation"


def test_a_directory_of_runs_stands_for_all_of_them(tmp_path: Path) -> None:
    other(tmp_path, "a")
    other(tmp_path, "b")
    (tmp_path / "results.md").write_text("of the sweep")
    assert sorted(frames(tmp_path)["run"].unique()) == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_unreadable_runs_are_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torn, newer, foreign = (other(tmp_path, name) for name in ("torn", "newer", "foreign"))
    whole = (torn / "metrics.jsonl").read_bytes()
    (torn / "metrics.jsonl").write_bytes(whole[: len(whole) - 30])
    (newer / "history.jsonl").write_bytes(b'{"version":99}\n{"version":99}\n')
    for path in foreign.iterdir():
        path.unlink()
    (foreign / "config.json").write_text('{"model_type": "qwen2"}')
    with caplog.at_level(logging.WARNING):
        table = frames([torn, newer, foreign, tmp_path / "nowhere"])
    assert list(table["run"].unique()) == [str(torn), str(newer)]
    assert list(table["generation"]) == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert f"{foreign} is not a run directory" in told and "it is left out" in told
    assert f"{newer / 'history.jsonl'}, line 1" in told
    assert "nowhere must be a run directory, found nothing there; it is left out" in told


def test_values_of_any_type_fit_into_parquet(tmp_path: Path) -> None:
    """Huge numbers, unpaired surrogates, several types in one column."""
    odd = other(tmp_path, "odd", sigma="\ud800", population_size=10**30, learning_rate=[1])
    with (odd / "metrics.jsonl").open("a") as file:
        file.write('{"progress/generation": 1e300, "x\\ud800": 5}\n{"no generation": 1}\n')
    table = frames([RUN, odd])
    write_table(table, tmp_path / "table.parquet")
    read = pandas.read_parquet(tmp_path / "table.parquet")
    assert (list(read.columns), len(read)) == (list(table.columns), len(table))
    assert list(table["optimizer.population_size"].unique()) == ["6", str(10**30)]
    assert list(table["optimizer.sigma"].unique())[1] == "?"


def test_a_table_has_another_name_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in .parquet or .csv, found .*table.xlsx"):
        write_table(frames(RUN), tmp_path / "table.xlsx")


def test_the_command_writes_the_file_and_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("all.parquet", "all.csv"):
        run_cli(
            main, Frames, [str(RUN), str(other(tmp_path, name[4:])), f"output={tmp_path / name}"]
        )
        assert capsys.readouterr().out.startswith("10 rows of 2 runs, with ")
    assert len(pandas.read_parquet(tmp_path / "all.parquet")) == 10
    assert "reward/mean" in pandas.read_csv(tmp_path / "all.csv")
