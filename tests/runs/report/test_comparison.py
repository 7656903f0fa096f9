"""The table and the curves say what the runs wrote, and nothing else."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.runs.history.format import Header, Record
from es_cookbook.runs.history.store import HistoryStore
from es_cookbook.runs.report.comparison import summarise, table

METRIC = "test/env/all/correct"


def written_run(
    path: Path, measured: Sequence[float | None], seconds: float = 2.0, ask: float | None = 0.03
) -> Path:
    """Two rollouts a generation; a metric measured before some, and after the last."""
    path.mkdir()
    history = HistoryStore(path / "history.jsonl", Header("model", None, None, None))
    rows: list[dict[str, float]] = []
    for generation, value in enumerate(measured):
        row: dict[str, float] = {"progress/generation": generation}
        row |= {} if value is None else {METRIC: value}
        is_last = generation == len(measured) - 1
        row["progress/rollouts"] = 2 * (generation + (not is_last))
        if not is_last:
            row |= {"time/total": seconds + generation, "time/tell": 0.01}
            row |= {} if ask is None else {"time/ask": ask}
            terms = tuple(Term(seed, 0.1) for seed in range(generation))
            history.append(Record(generation, Step(terms), (0.0,), 0))
        rows.append(row)
    history.close()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_summary_has_the_numbers_of_the_metrics_files(tmp_path: Path) -> None:
    paths = [
        written_run(tmp_path / "a", [0.25, None, 0.5, 0.75]),
        written_run(tmp_path / "b", [0.25, None, 0.0, 0.5], seconds=4.0),
    ]
    summary = summarise(paths, METRIC)
    # Measured before a generation, so after the rollouts of those before it.
    assert summary.curve.rollouts_M.tolist() == [0, 4, 6]
    assert summary.curve.values_R_M.tolist() == [[0.25, 0.5, 0.75], [0.25, 0.0, 0.5]]
    # (0.375 · 4 + 0.625 · 2) / 6 and (0.125 · 4 + 0.25 · 2) / 6
    assert summary.curve.heights_R == pytest.approx([2.75 / 6, 1 / 6])
    assert summary.rollouts_R == [6, 6]
    assert summary.seconds_R == pytest.approx([3.0, 5.0])
    assert summary.optimizer_share_R == pytest.approx([0.12 / 9, 0.12 / 15])
    assert summary.terms_R == [1.0, 1.0]


def test_the_table_shows_mean_and_range(tmp_path: Path) -> None:
    a = written_run(tmp_path / "a", [0.25, 0.75])
    b = written_run(tmp_path / "b", [0.25, 0.5])
    text = table({"es": summarise([a, b], METRIC), "one": summarise([b], METRIC)}, METRIC)
    assert text.splitlines()[2:] == [
        "| es | 2 | 62.5 % (50.0 … 75.0) | 43.8 % (37.5 … 50.0) | 2 | 2 | 2 % | 0 |",
        "| one | 1 | 50.0 % (50.0 … 50.0) | 37.5 % (37.5 … 37.5) | 2 | 2 | 2 % | 0 |",
    ]


def test_a_metric_that_is_no_share_is_not_shown_as_one(tmp_path: Path) -> None:
    path = written_run(tmp_path / "a", [0.25, 0.75])
    metrics = path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace(METRIC, "test/reward/mean"))
    text = table({"es": summarise([path], "test/reward/mean")}, "test/reward/mean")
    assert "| 0.75 (0.75 … 0.75) | 0.5 (0.5 … 0.5) |" in text


def test_runs_from_before_ask_and_tell_were_timed_have_no_share(tmp_path: Path) -> None:
    summary = summarise([written_run(tmp_path / "a", [0.25, 0.75], ask=None)], METRIC)
    assert math.isnan(summary.optimizer_share_R[0])


def test_runs_that_cannot_be_one_curve_are_refused(tmp_path: Path) -> None:
    a = written_run(tmp_path / "a", [0.25, None, 0.5])
    b = written_run(tmp_path / "b", [0.25, 0.5, 0.5])
    with pytest.raises(ConfigError, match=r"b was measured after \[0, 2, 4\] rollouts and .*a"):
        summarise([a, b], METRIC)
    with pytest.raises(ConfigError, match="has no test/env/all/formt, so it cannot be compared"):
        summarise([a], "test/env/all/formt")
