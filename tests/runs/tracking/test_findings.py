"""What goes wrong in a run is read from its metrics, and said once."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from es_cookbook.runs.tracking.findings import Findings, all_findings
from es_cookbook.runs.tracking.jsonl import read_metrics

RECORDED = Path(__file__).parent / "data"
LEARNED, FAILED = (sorted(RECORDED.glob(f"{folder}*.jsonl")) for folder in ("", "failing/"))
"""Metrics of runs of recipes, with the settings that the recipes have, and of runs that cannot
learn: `python -m benchmarks.recipes record [NAME …]` records them anew."""
WHY: Mapping[str, tuple[str, str]] = {
    "sigma_large": ("far", "lower optimizer.sigma (now 0.3), since genomes earn 0.002"),
    "sigma_small": ("nothing", "raise optimizer.sigma (now 1e-06)"),
    "rate_large": ("fallen", "lower the learning rate, since the held-out reward fell from"),
    "cut": ("cut", "95% of the answers were cut off at sampling.max_tokens: raise it"),
    "constant": ("nothing", "differ, have the reward tell them apart"),
    "never": ("nothing", "whether the reward takes right answers"),
}
"""What is to be said of the latter: a kind, and what stands in its sentence."""
FINE = {
    "reward/mean": 0.4,
    "reward/max_genome": 0.6,
    "reward/min_genome": 0.2,
    "reward/std_genomes": 0.1,
    "genomes/tied_fraction": 0.2,
    "genomes/reliability": 0.5,
    "step/rms_over_sigma": 0.3,
    "optimizer/sigma": 0.001,
    "rollouts/truncated": 0.1,
    "time/total": 1.0,
}
NO_REWARD = {"reward/mean": 0.0, "reward/max_genome": 0.0, "reward/min_genome": 0.0}


def told(*rows: Mapping[str, float]) -> list[str]:
    """The sentences, each once for as often as it was told."""
    found = Findings()
    return [sentence for row in rows for sentence in found.take(row)]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (NO_REWARD, "every reward is 0, so nothing is learned: see in rollouts.jsonl whether"),
        (
            {"reward/std_genomes": 7e-18},
            r"all genomes earn the same \(0.4\), so nothing is learned: if answers in "
            r"rollouts.jsonl differ, have the reward tell them apart; if not, raise "
            r"optimizer.sigma \(now 0.001\), or ask more problems per generation; see \"Finding σ",
        ),
        ({"genomes/tied_fraction": 1.0}, "the step is empty or luck, .*: raise optimizer.sigma"),
        ({"step/rms_over_sigma": 0.0}, "the step is empty or luck, .*: raise optimizer.sigma"),
        (
            {"step/rms_over_sigma": 0.0, "optimizer/learning_rate": 0.0},
            "the step is empty, since optimizer.learning_rate is 0 here$",
        ),
        (
            {"rollouts/truncated": 0.31, "rollouts/ran_on": 0.1},
            r"31% of the answers were cut off at sampling.max_tokens: raise it, or ask for shorter",
        ),
        (
            {"rollouts/truncated": 0.9, "rollouts/ran_on": 0.8},
            r'90% of the answers were cut .*: most do not stop, .*; sampling.stop="\\n" ends an',
        ),
    ],
)
def test_a_generation_that_brought_nothing_says_why_and_what_to_change(
    changed: Mapping[str, float], sentence: str
) -> None:
    (found,) = told({**FINE, **changed})
    assert re.match(sentence, found)


def test_a_good_generation_says_nothing() -> None:
    assert told(FINE, FINE, FINE, FINE) == []
    assert told({"reward/mean": 0.0, "throughput/tokens_per_second": 9.0}) == [], "of gradients"
    kept = {**FINE, "step/rms_over_sigma": 0.0, "genetic/age": 3.0}
    assert told(kept) == [], "a champion stays"


@pytest.mark.parametrize("path", LEARNED, ids=lambda path: path.stem)
def test_runs_that_learned_are_told_nothing(path: Path) -> None:
    rows = read_metrics(path)
    assert rows[-1]["test/reward/mean"] > rows[0]["test/reward/mean"]
    assert list(all_findings(rows)) == []
    assert told(*rows) == []


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_runs_that_could_not_learn_are_told_why(path: Path) -> None:
    kind, change = WHY[path.stem]
    found, said = Findings(), dict[str, str]()
    for row in read_metrics(path):
        found.take(row)
        said = {**found.latest, **said}
    assert set(said) == {kind} and change in said[kind]


def test_every_failing_run_and_every_kind_of_finding_is_recorded() -> None:
    assert {path.stem for path in FAILED} == set(WHY)
    assert {kind for kind, _ in WHY.values()} == {"nothing", "far", "fallen", "cut"}


def test_what_was_told_is_told_again_after_twenty_generations() -> None:
    nothing, cut = {**FINE, **NO_REWARD}, {**FINE, "rollouts/truncated": 0.5}
    assert len(told(nothing, FINE, nothing, cut, nothing)) == 2
    assert len(told(*[nothing] * 41)) == 3


@pytest.mark.parametrize("changed", [NO_REWARD, {"reward/std_genomes": 0.0}])
def test_where_genomes_earn_far_less_than_the_centre_sigma_is_too_large(
    changed: Mapping[str, float],
) -> None:
    row = {**FINE, "reward/mean": 0.02, **changed}
    (found,) = told({**row, "test/reward/mean": 0.5})
    assert ": lower optimizer.sigma (now 0.001), since genomes earn 0" in found
    assert " and the centre 0.5 on held-out problems; see " in found
    few = {"test/reward/mean": 0.5, "test/low/reward/mean": 0.0}
    for held_out in ({"test/reward/mean": 0.0}, few):
        (found,) = told({**row, **held_out})
        assert "lower" not in found


def test_of_a_few_generations_without_a_signal_nothing_is_told() -> None:
    nothing = {**FINE, **NO_REWARD}
    assert told(FINE, nothing, FINE, nothing, FINE) == []
    assert len(told(FINE, nothing, nothing)) == 1
    assert told(*[FINE] * 20, *[nothing] * 10) == [], "half of the last twenty"
    assert len(told(*[FINE] * 20, *[nothing] * 11)) == 1


def test_a_whole_run_has_a_sentence_for_each_kind() -> None:
    nothing = {**FINE, **NO_REWARD}
    rows = [nothing, nothing, FINE, {**nothing, "rollouts/truncated": 0.5}, {}]
    first, second = all_findings(
        [{"progress/generation": generation, **row} for generation, row in enumerate(rows)]
    )
    assert first.startswith("3 of generations 1 to 4: every reward is 0, so nothing is learned")
    assert second.startswith("generation 4: 50% of the answers were cut off")
    assert list(all_findings([FINE] * 5)) == []
