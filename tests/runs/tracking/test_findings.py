"""What goes wrong in a run is read from its metrics, and said once."""

import re
from collections.abc import Mapping

import pytest

from es_cookbook.runs.tracking.findings import Findings, all_findings

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
    found = Findings()
    return [kind for row in rows for kind, _ in found.take(row)]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (NO_REWARD, "every reward is 0, so nothing is learned: see in rollouts.jsonl whether"),
        (
            {"reward/std_genomes": 7e-18},
            r"all genomes earn the same \(0.4\), so nothing is learned: raise optimizer.sigma "
            r"\(now 0.001\), or ask more problems per generation; see \"Finding σ and α\" in docs/",
        ),
        ({"genomes/tied_fraction": 1.0}, "the step is empty or luck, .*: raise optimizer.sigma"),
        ({"step/rms_over_sigma": 0.0}, "the step is empty or luck, .*: raise optimizer.sigma"),
        (
            {"step/rms_over_sigma": 0.0, "optimizer/learning_rate": 0.0},
            "the step is empty, since optimizer.learning_rate is 0 here$",
        ),
        (
            {"rollouts/truncated": 0.31, "rollouts/ran_on": 0.1, "rollouts/repeated": 0.0},
            r"31% of the answers were cut off at sampling.max_tokens: raise it, or ask for shorter",
        ),
        (
            {"rollouts/truncated": 0.9, "rollouts/ran_on": 0.8},
            r'90% of the answers were cut .*: most do not stop, .*; sampling.stop="\\n" ends an',
        ),
        (
            {"rollouts/truncated": 0.9, "rollouts/ran_on": 0.1, "rollouts/repeated": 0.5},
            r"90% of the answers were cut .* repeat themselves, so a higher limit is no help",
        ),
    ],
)
def test_a_generation_that_brought_nothing_says_why_and_what_to_change(
    changed: Mapping[str, float], sentence: str
) -> None:
    ((_, found),) = Findings().take({**FINE, **changed})
    assert re.match(sentence, found)


def test_a_good_generation_says_nothing() -> None:
    assert told(FINE, FINE, FINE, FINE) == []
    assert told({"reward/mean": 0.0, "throughput/tokens_per_second": 9.0}) == [], "of gradients"
    kept = {**FINE, "step/rms_over_sigma": 0.0, "genetic/age": 3.0}
    assert told(kept) == [], "a champion stays"


def test_luck_is_told_after_three_generations_of_it() -> None:
    luck = {**FINE, "genomes/reliability": 0.01}
    assert told(luck, luck) == []
    assert told(luck, luck, FINE, luck, luck) == []
    assert told(luck, luck, luck, luck) == ["luck"]


def test_what_was_told_is_told_again_after_twenty_generations() -> None:
    nothing, cut = {**FINE, **NO_REWARD}, {**FINE, "rollouts/truncated": 0.5}
    assert told(nothing, FINE, nothing, cut, nothing) == ["zero", "cut"]
    assert told(*[nothing] * 41) == ["zero"] * 3


@pytest.mark.parametrize("changed", [NO_REWARD, {"genomes/tied_fraction": 1.0}])
def test_where_genomes_earn_far_less_than_the_centre_sigma_is_too_large(
    changed: Mapping[str, float],
) -> None:
    row = {**FINE, "reward/mean": 0.02, **changed}
    ((_, found),) = Findings().take({**row, "test/reward/mean": 0.5})
    assert ": lower optimizer.sigma (now 0.001), since genomes earn 0" in found
    assert " and the centre 0.5 on held-out problems; see " in found
    few = {"test/reward/mean": 0.5, "test/low/reward/mean": 0.0}
    for held_out in ({"test/reward/mean": 0.0}, few):
        ((_, found),) = Findings().take({**row, **held_out})
        assert "lower" not in found


def test_a_held_out_result_that_did_not_change_at_all_is_told_once() -> None:
    measured = {"test/env/all/correct": 0.25, "test/reward/mean": 0.3}
    assert told({**FINE, **measured}, FINE, {**FINE, **measured}, FINE, measured) == ["unchanged"]
    found = Findings()
    for row in ({**FINE, **measured}, FINE, {**FINE, **measured}, FINE):
        found.take(row)
    assert [kind for kind, _ in found.latest] == ["unchanged"], "a view still shows it"
    found = Findings()
    found.take({**FINE, **NO_REWARD, **measured})
    assert [said for _, said in found.take(measured)] == [
        "the held-out result is the same as before the first generation in every digit: nothing "
        'was learned; see "Finding σ and α" in docs/hyper_parameters.md'
    ]
    assert told({**FINE, **measured}, FINE, {**measured, "test/reward/mean": 0.31}) == []
    longer = {**measured, "test/rollouts/mean_tokens": 9.0}
    assert told({**FINE, **longer}, {**longer, "test/rollouts/mean_tokens": 9.1}) == []


def test_a_main_metric_that_is_the_same_in_three_evaluations_is_told() -> None:
    def evaluated(correct: float, *rewards: float) -> list[str]:
        found, said = Findings(), list[str]()
        for tokens, reward in enumerate(rewards):
            measured = {"test/env/all/correct": correct, "test/reward/mean": reward}
            row = {**FINE, **measured, "test/rollouts/mean_tokens": float(tokens)}
            said += [sentence for _, sentence in found.take(row)]
        return said

    assert evaluated(0.25, 0.3, 0.3) == []
    assert evaluated(0.25, 0.3, 0.28, 0.3, 0.29) == [
        "the held-out result (test/env/all/correct 0.25) is the same in all 3 evaluations: raise "
        'optimizer.learning_rate or optimizer.sigma; see "Finding σ and α" in '
        "docs/hyper_parameters.md"
    ]
    assert evaluated(0.0, 0.3, 0.35, 0.4) == [], "the reward moves"
    (solved,) = evaluated(1.0, 1.0, 1.0, 1.0)
    assert solved.endswith(": every held-out problem is solved, so take harder ones")


def test_gradients_have_no_sigma_to_change() -> None:
    measured = {"test/reward/mean": 0.3, "reward/mean": 0.1, "optimizer/learning_rate": 1e-6}
    found = Findings()
    found.take(measured)
    ((_, sentence),) = found.take(measured)
    assert sentence.endswith("in every digit: raise learning_rate")


def test_a_whole_run_has_a_sentence_for_each_kind() -> None:
    nothing = {**FINE, **NO_REWARD}
    rows = [nothing, nothing, FINE, {**nothing, "rollouts/truncated": 0.5}, {}]
    first, second = all_findings(
        [{"progress/generation": generation, **row} for generation, row in enumerate(rows)]
    )
    assert first.startswith("3 generations of 1 to 4: every reward is 0, so nothing is learned")
    assert second.startswith("generation 4: 50% of the answers were cut off")
    assert list(all_findings([FINE] * 5)) == []
