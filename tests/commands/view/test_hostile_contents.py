"""Rows that only a stranger writes: a summary, a page, a table or one sentence that can be read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.commands.view import frames, plot, report, runs, show
from es_cookbook.common.cli import run_cli
from tests.runs.test_damaged_directories import RUNS

ROWS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a name of 100 kB": ("metrics.jsonl", lambda row: row.update({"a" * 100_000: 1.0})),
    "20,000 metrics": (
        "metrics.jsonl",
        lambda row: row.update({f"m/{i}": 1.0 for i in range(20_000)}),
    ),
    "metrics that are objects": (
        "rollouts.jsonl",
        lambda row: row.update(metrics={"reward": {"a": [1]}, "b": [1, 2], "c": "x", "d": None}),
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_strangers_rows_are_shown_or_refused_in_a_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUNS[0], run)
    name, change = ROWS[kind]
    rows = [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]
    change(rows[-1])
    (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for main, config, options in (
        (show.main, show.Show, [str(run)]),
        (report.main, report.Report, [str(run), f"output={tmp_path / 'report.html'}"]),
        (frames.main, frames.Frames, [str(run), f"output={tmp_path / 'table.csv'}"]),
        (runs.main, runs.Runs, [str(tmp_path)]),
    ):
        run_cli(main, config, options)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run_cli(plot.main, plot.Plot, [str(run), "metric=env/all/rewards"])
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "has not measured env/all/rewards" in sentence
    assert len(sentence) < 10_000
