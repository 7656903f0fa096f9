"""The harness behind `make bench`: fair turns, medians, and tables that can be rewritten."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

from benchmarks import analytic, harness, main_job, momentum_divergence, optimizers, pass_at_k
from benchmarks.__main__ import rewrite_readme
from benchmarks.model_families import Family, documented, rewrite
from benchmarks.mutations import mutants
from benchmarks.problems import Points, Problem, Values, ackley, rastrigin, rosenbrock, sphere
from es_cookbook.checkpoints.models import load_tokenizer
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.data.problem_dataset import ProblemDataset


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


MODULE = """
RATE: float = 0.5
def step(rate, count=3, *, scale: 1 = None):
    say(2)
    if count > 1 and not rate:
        raise ValueError(4)
    return [max(rate * each, 0) for each in scale if each]
"""


def test_a_mutant_is_a_change_of_one_operator_number_or_condition() -> None:
    found = list(mutants(str(Path("x.py")), MODULE))
    changes = [mutant.change for mutant in found]
    assert changes == [
        "2: 0.5 -> 0.25",
        "3: 3 -> 4",
        "5: count > 1 and (not rate) -> count > 1 or not rate",
        "5: count > 1 -> count >= 1",
        "5: 1 -> 2",
        "5: not rate -> not not rate",
        "7: max -> min",
        "7: rate * each -> rate / each",
        "7: 0 -> 1",
        "7: [max(rate * each, 0) for each in scale if each] -> "
        "[max(rate * each, 0) for each in scale if not each]",
    ]
    assert [bool(mutant.functions) for mutant in found] == [False, False] + [True] * 8
    (function,) = found[7].functions.values()
    assert FunctionType(function, {"say": print})(6, 0, scale=[2]) == [3]


@pytest.mark.parametrize(
    ("f", "optimum", "elsewhere"),
    [
        (sphere, 0.0, 3.0),
        (rastrigin, 0.0, 3.0),
        (rosenbrock, 1.0, 2.0),
        (ackley, 0.0, 20 - 20 * math.exp(-0.2)),
    ],
)
def test_a_function_is_0_at_its_optimum(
    f: Callable[[Points], Values], optimum: float, elsewhere: float
) -> None:
    """And at all ones, or all zeros, what the formula says by hand for three dimensions."""
    other = 0.0 if optimum == 1 else 1.0
    points = np.array([[optimum] * 3, [other] * 3], np.float32)
    assert f(points) == pytest.approx([0, elsewhere], abs=1e-5)


def test_targets_are_part_of_the_way_of_the_references_median_and_its_best() -> None:
    curves = [np.array([100.0, 10.0, 1.0, 5.0])] * 2 + [np.array([100.0, 1.0, 1.0, 1.0])]
    assert analytic.targets(curves) == pytest.approx({"half": 10.0, "nine tenths": 10**0.2})


def test_evaluations_are_counted_to_the_generation_that_reached_the_target() -> None:
    problem = Problem(sphere, 1.0, 2, generations=3, sigma=0.1)
    curve = np.array([9.0, 4.0, 5.0, 3.0])
    needed = [analytic.reached(curve, target, problem) / 64 for target in (9, 4, 3, 1)]
    assert needed == [0, 1, 3, 6], "twice the budget where it is never reached"


def test_luck_explains_a_ratio_a_little_above_1_and_no_large_one() -> None:
    below = [100.0, 110, 120, 130, 140, 150, 160, 170, 180, 190]
    near = analytic.ratio_row("near", [value + 4 for value in below], below, paired=False)
    far = analytic.ratio_row("far", [value + 90 for value in below], below, paired=False)
    assert near.value > 1 and near.met is True
    assert far.met is False


def test_where_a_seed_is_the_same_luck_on_both_sides_little_is_left_to_it() -> None:
    below = [100.0, 110, 120, 130, 140, 150, 160, 170, 180, 190]
    slower = [value + 4 for value in below]
    assert analytic.ratio_row("slower", slower, below, paired=True).met is False
    assert analytic.ratio_row("equal", below, below, paired=True).spread == 0
    mixed = [value + (4 if i % 2 else -3) for i, value in enumerate(below)]
    assert analytic.ratio_row("mixed", mixed, below, paired=True).met is True


def test_es_moves_as_evosaxs_with_the_same_noise() -> None:
    pytest.importorskip("evosax", reason="the other library: pip install 'es-cookbook[compare]'")
    problem = Problem(rosenbrock, 2.0, 20, generations=15, sigma=0.1, learning_rate=0.2)
    mine = analytic.CONTESTS["es"].ours(problem, 3)
    assert mine[-1] < mine[0] / 2
    assert analytic.open_es(problem, 3, same_noise=True) == pytest.approx(mine, rel=1e-4)
    assert analytic.open_es(problem, 3) != pytest.approx(mine, rel=1e-4), "its own noise is another"


def test_a_sum_of_momentum_is_ten_steps_of_a_steady_gradient() -> None:
    change = momentum_divergence.summed()
    steps = [change(Step((Term(7, 0.5),))) for _ in range(200)]
    moved = [math.fsum(term.coefficient for term in step.terms) for step in steps]
    assert moved[0] == 0.5 and moved[1] == pytest.approx(0.95)
    assert moved[-1] == pytest.approx(5.0, rel=1e-3)


def test_every_optimizer_can_be_driven_for_its_cost() -> None:
    driven = optimizers.drive("momentum", 3)
    assert [len(step.terms) for step in driven.steps] == [32, 64, 96]
    assert len(driven.seconds) == 3 and min(driven.seconds) > 0


@pytest.mark.anyio
async def test_the_hidden_operator_can_be_guessed_and_not_known() -> None:
    """The same one for the same problem, in the shares that the benchmark's figures rest on."""
    builder = pass_at_k.HiddenOperatorDatasetBuilder(num_train=2000, num_test=20)
    datasets, again = [await builder(load_tokenizer(str(BUNDLED_MODEL))) for _ in range(2)]
    problems = [datasets.train.get_batch(n) for n in range(2)]
    assert [len(batch) for batch in problems] == [32, 32]
    await datasets.train.validate(context_length=512)
    assert isinstance(datasets.train, ProblemDataset) and isinstance(again.train, ProblemDataset)
    hidden = [str(problem.gold) for problem in datasets.train.builders]
    assert hidden == [problem.gold for problem in again.train.builders]
    for operator, times in pass_at_k.TIMES_HIDDEN.items():
        assert hidden.count(operator) / 2000 == pytest.approx(times / 10, abs=0.04)
    env = datasets.train.builders[0].make_env()
    rewards = [env.grade(text).reward for text in (hidden[0], hidden[0] * 2, "", "9")]
    assert rewards == [1, 0, 0, 0]


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


def test_the_main_jobs_curves_are_drawn_from_its_runs_metrics(tmp_path: Path) -> None:
    for seed, correct in enumerate((0.5, 0.75)):
        rows = [{"progress/generation": t, main_job.CORRECT: t * correct / 10} for t in (0, 10)]
        (tmp_path / str(seed)).mkdir()
        lines = "".join(f"{json.dumps(row)}\n" for row in (*rows, {"progress/generation": 11}))
        (tmp_path / str(seed) / "metrics.jsonl").write_text(lines)
    main_job.draw_runs([tmp_path / "0", tmp_path / "1"], tmp_path / "plot")
    assert (tmp_path / "plot.png").stat().st_size > 0
    drawing = (tmp_path / "plot.svg").read_text()
    assert "<!-- seed 0 -->" in drawing and "<!-- seed 1 -->" in drawing


def test_spreading_guesses_is_what_pass_at_4_pays_for() -> None:
    def pass_at(k: int, said: Sequence[float]) -> float:
        times = pass_at_k.TIMES_HIDDEN.values()
        return sum(n / 10 * (1 - (1 - q) ** k) for n, q in zip(times, said, strict=True))

    assert pass_at(1, (1, 0, 0, 0)) == pass_at(4, (1, 0, 0, 0)) == pytest.approx(0.4)
    assert pass_at(1, (0.25,) * 4) == pytest.approx(0.25)
    assert pass_at(4, (0.25,) * 4) == pytest.approx(0.68, abs=0.005)
    best = max(pass_at(4, (a, b, c, 1 - a - b - c)) for a, b, c in shares())
    assert best == pytest.approx(0.73, abs=0.005)


def shares() -> Iterator[tuple[float, float, float]]:
    """Shares of three that leave something for a fourth, in steps of 0.02."""
    for a, b, c in itertools.product(range(0, 101, 2), repeat=3):
        if a + b + c <= 100:
            yield a / 100, b / 100, c / 100
