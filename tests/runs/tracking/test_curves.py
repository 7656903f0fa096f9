"""The table and the curves say what the runs wrote, and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.runs.history.format import Header, Record
from es_cookbook.runs.history.store import HistoryStore
from es_cookbook.runs.tracking.curves import shared_points, table
from es_cookbook.runs.tracking.reading import RunFiles, read_run

METRIC = "test/env/all/correct"


def written_run(
    path: Path,
    measured: Sequence[float | None],
    seconds: float = 2.0,
    ask: float | None = 0.03,
    metric: str = METRIC,
) -> RunFiles:
    """Two rollouts a generation; a metric measured before some, and after the last."""
    path.mkdir()
    history = HistoryStore(path / "history.jsonl", Header("model", "ab", "cd", "float32"))
    rows: list[dict[str, float]] = []
    for generation, value in enumerate(measured):
        row: dict[str, float] = {"progress/generation": generation}
        row |= {} if value is None else {metric: value}
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
    return read_run(path)


def test_the_table_has_the_numbers_of_the_metrics_files(tmp_path: Path) -> None:
    a = written_run(tmp_path / "a", [0.25, None, 0.5, 0.75])
    b = written_run(tmp_path / "b", [0.25, None, 0.0, 0.5], seconds=4.0)
    x_M, _ = shared_points([a, b], METRIC, "rollouts")
    # Measured before a generation, so after the rollouts of those before it.
    assert list(x_M) == [0, 4, 6]
    unmeasured = written_run(tmp_path / "c", [0.25, 0.75], ask=None)
    text = table({"es": [a, b], "one": [b], "old": [unmeasured]}, METRIC)
    assert text.splitlines()[2:] == [
        "| es | 2 | 62.5 % (50.0 … 75.0) | 6 | 4 |",
        "| one | 1 | 50.0 % (50.0 … 50.0) | 6 | 5 |",
        "| old | 1 | 75.0 % (75.0 … 75.0) | 2 | 2 |",
    ]


def test_runs_that_were_not_measured_alike_are_refused(tmp_path: Path) -> None:
    a = written_run(tmp_path / "a", [0.25, None])
    b = written_run(tmp_path / "b", [None, 0.5])
    with pytest.raises(ConfigError, match="were never measured after the same number of"):
        table({"es": [a, b]}, METRIC)
    with pytest.raises(ConfigError, match="has not measured test/env/all/formt over rollouts"):
        table({"es": [a]}, "test/env/all/formt")
    (tmp_path / "a/metrics.jsonl").write_text(f'{{"{METRIC}": 1, "progress/rollouts": 1}}\n')
    with pytest.raises(ConfigError, match="does not count rollouts and time"):
        table({"es": [read_run(tmp_path / "a")]}, METRIC)
