"""Rows that only a stranger writes: a summary, a page, a table or one sentence that can be read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.directory.test_damaged_directories import RUNS
from tests.said import refused, typed

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
def test_a_strangers_rows_are_shown_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUNS[0], run)
    name, change = ROWS[kind]
    rows = [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]
    change(rows[-1])
    (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    output = (f"output={tmp_path / 'report.html'}", f"output={tmp_path / 'table.csv'}")
    for command in (["show"], ["report", output[0]], ["frames", output[1]]):
        assert typed(*command, str(run)).returncode == 0
    assert typed("runs", str(tmp_path)).returncode == 0
    sentence = refused("plot", str(run), "metric=env/all/rewards")
    assert "has not measured env/all/rewards" in sentence
    assert len(sentence) < 10_000
