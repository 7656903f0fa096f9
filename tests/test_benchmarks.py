"""The harness behind `make bench`: fair turns, medians, and tables that can be rewritten."""

import json
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.__main__ import rewrite_readme


def test_functions_take_turns_and_warm_ups_are_not_counted() -> None:
    calls: list[str] = []
    times = harness.interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2, warmups=1
    )
    assert "".join(calls) == "ababab"
    assert [len(seconds) for seconds in times.values()] == [2, 2]


def test_a_row_is_a_median_beside_its_goal() -> None:
    row = harness.row("speed", harness.ratios([2, 9, 4], [1, 3, 1]), "x", at_least=2.5)
    assert (row.value, row.goal, row.met, row.repeats) == (3, ">= 2.5", True, 3)
    assert harness.row("memory", [3.0], "GB", at_most=2).met is False
    assert harness.row("free", [3.0], "s").goal is None


def test_results_are_written_with_their_machine_and_the_readme_is_rewritten_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    harness.report("speed", [harness.row("ours / theirs", [1.5, 2.0, 3.0], "x", at_least=1)])
    assert "| ours / theirs | 2 x | >= 1 | yes | 3 |" in capsys.readouterr().out
    written = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert set(written) == {"machine", "commit", "rows"}
    assert written["rows"][0]["value"] == 2.0
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    rewrite_readme(readme, tmp_path / "results")
    once = readme.read_text()
    rewrite_readme(readme, tmp_path / "results")
    assert readme.read_text() == once
    assert "old" not in once and once.startswith("before") and once.endswith("after\n")
    assert "## speed" in once and "python -m benchmarks.speed" in once
