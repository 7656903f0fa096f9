"""The harness behind `make bench`: fair turns, medians, and tables that can be rewritten."""

import json
from pathlib import Path

import pytest

from benchmarks import analytic, harness
from benchmarks.__main__ import rewrite_readme
from benchmarks.model_families import Family, documented, rewrite
from benchmarks.problems import Problem, rosenbrock


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
    assert set(written) == {"command", "machine", "commit", "rows"}
    harness.report("speed", [harness.row("theirs", [1.0], "s")], "uphill")
    assert written["rows"][0]["value"] == 2.0
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    rewrite_readme(readme, tmp_path / "results")
    once = readme.read_text()
    rewrite_readme(readme, tmp_path / "results")
    assert readme.read_text() == once
    assert "old" not in once and once.startswith("before") and once.endswith("after\n")
    assert "## speed\n\n`python -m benchmarks.speed` at" in once
    assert "## speed-uphill\n\n`python -m benchmarks.speed uphill` at" in once


def test_es_moves_as_evosaxs_with_the_same_noise() -> None:
    pytest.importorskip("evosax", reason="the other library: pip install 'es-cookbook[compare]'")
    problem = Problem(rosenbrock, 2.0, 20, generations=15, sigma=0.1, learning_rate=0.2)
    mine = analytic.CONTESTS["es"].ours(problem, 3)
    assert mine[-1] < mine[0] / 2
    assert analytic.open_es(problem, 3, same_noise=True) == pytest.approx(mine, rel=1e-4)
    assert analytic.open_es(problem, 3) != pytest.approx(mine, rel=1e-4), "its own noise is another"


def test_models_that_are_alike_are_a_row_and_the_counts_are_the_rows() -> None:
    found = [
        Family("C", "own, no cache", 0.2, left_out="`q`", difference=3e-5, export="directory"),
        Family("A", "flat", 0.5, True, "", 1e-6, "low rank", "directory, adapter"),
        Family("B", "flat", 0.98, True, "", 2e-6, "low rank", "directory, adapter"),
        Family("D", "not tried: It needs a package."),
        Family("E", "refused: it takes sounds"),
    ]
    empty = "0\n<!-- counts -->x<!-- /counts -->\n1\n<!-- table -->y<!-- /table -->\n2\n"
    page = rewrite(empty, found)
    rows = [
        "| A, B | flat | 50 to 98 %, experts too | 2e-6 | low rank | directory, adapter |",
        "| C | own, no cache | 20 %, not: `q` | 3e-5 | - | directory |",
        "| D | not tried: It needs a package. | - | - | - | - |",
        "| E | refused: it takes sounds | - | - | - | - |",
    ]
    assert page.splitlines()[-8:-3] == ["|---|---|---|---|---|---|", *rows]
    assert "5 causal language model classes of transformers, 3 are right, 1 are refused" in page
    assert documented(page) == {family.name: family.path for family in found}
    assert rewrite(page, found) == page and page.startswith("0\n") and page.endswith("\n2\n")
