"""What a run brought is read from its metrics, and told in one line."""

import json
from pathlib import Path

import pytest

from es_cookbook.runs.tracking.jsonl import Result, elapsed, result_of


def write(path: Path, *rows: dict[str, float]) -> Path:
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_result_is_what_was_measured_first_and_last(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"test/env/all/correct": 0.412, "reward/mean": -2.0, "time/total": 100.0},
        {"reward/mean": -1.5, "time/total": 146.0},
        {"test/env/all/correct": 0.655},
    )
    found = result_of(tmp_path)
    assert found == Result(
        tmp_path,
        {"test/env/all/correct": 0.412, "reward/mean": -2.0},
        {"test/env/all/correct": 0.655, "reward/mean": -1.5},
    )
    assert found.gain() == "test/env/all/correct 0.412 -> 0.655 (+24.3 points)"
    assert found.gain("test/env/all/no_such_metric") == "reward/mean -2.000 -> -1.500 (+0.500)"


def test_the_largest_pass_at_k_is_told_too(tmp_path: Path) -> None:
    before = {"test/reward/mean": 0.2, "test/pass@1": 0.1, "test/pass@2": 0.2, "test/pass@16": 0.5}
    write(tmp_path, before, before | {"test/pass@2": 0.3, "test/pass@16": 0.625})
    assert result_of(tmp_path).gain() == (
        "test/reward/mean 0.200 -> 0.200 (+0.000), test/pass@16 0.500 -> 0.625 (+12.5 points)"
    )


def test_a_run_that_has_measured_nothing_says_so(tmp_path: Path) -> None:
    assert result_of(tmp_path) == Result(tmp_path, {}, {})
    assert result_of(tmp_path).gain() == "nothing was measured"


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (0, "12 s (3 generations: 7 s)"),
        (1, "12 s (2 generations: 6 s)"),
        (2, "12 s (1 generation: 4 s)"),
        (4, "12 s (no generation was left to run)"),
    ],
)
def test_the_time_of_a_run_that_went_on_is_of_its_last_process(before: int, told: str) -> None:
    rows: list[dict[str, float]] = [
        {"time/total": seconds, "time/unix": generation}
        for generation, seconds in enumerate((1.0, 2.0, 4.0))
    ]
    assert elapsed(12.0, [*rows, {"test/pass@4": 0.5}], before) == told
