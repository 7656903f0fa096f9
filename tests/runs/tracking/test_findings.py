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
            r"\(now 0.001\), or ask more problems per generation; see docs/hyper_parameters.md",
        ),
        ({"genomes/tied_fraction": 1.0}, "the step is empty or luck, .*: raise optimizer.sigma"),
        ({"step/rms_over_sigma": 0.0}, "the step is empty or luck, .*: raise optimizer.sigma"),
        ({"rollouts/truncated": 0.31}, r"31% of the answers were cut off at sampling.max_tokens"),
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


def test_a_held_out_result_that_did_not_change_at_all_is_told_in_the_end() -> None:
    measured = {"test/env/all/correct": 0.25, "test/reward/mean": 0.3}
    assert told({**FINE, **measured}, {**FINE, **measured}, measured) == ["unchanged"]
    found = Findings()
    found.take({**FINE, **NO_REWARD, **measured})
    assert [said for _, said in found.take(measured)] == [
        "the held-out result is the same as before the first generation in every digit: nothing "
        "was learned; see docs/hyper_parameters.md"
    ]
    assert told({**FINE, **measured}, FINE, {**measured, "test/reward/mean": 0.31}) == []


def test_a_whole_run_has_a_sentence_for_each_kind() -> None:
    nothing = {**FINE, **NO_REWARD}
    rows = [nothing, nothing, FINE, {**nothing, "rollouts/truncated": 0.5}, {}]
    first, second = all_findings(
        [{"progress/generation": generation, **row} for generation, row in enumerate(rows)]
    )
    assert first.startswith("3 generations of 1 to 4: every reward is 0, so nothing is learned")
    assert second.startswith("generation 4: 50% of the answers were cut off")
    assert list(all_findings([FINE] * 5)) == []
