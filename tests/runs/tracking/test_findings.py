"""What goes wrong in a run is read from its metrics, and said once."""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.runs.tracking.findings import Findings, all_findings
from es_cookbook.runs.tracking.jsonl import read_metrics

RECORDED = Path(__file__).parent / "data"
LEARNED, FAILED = (sorted(RECORDED.glob(f"{folder}*.jsonl")) for folder in ("", "failing/"))
"""Metrics of runs of recipes, with the settings that the recipes have, and of runs that cannot
learn: `python -m benchmarks.recipes record [NAME …]` records them anew."""
WHY: Mapping[str, Mapping[str, str]] = {
    "sigma_large": {"far": "lower optimizer.sigma (now 0.3), since genomes earn 0.002"},
    "sigma_small": {"equal": "raise optimizer.sigma (now 1e-06)", "unchanged": "nothing was learn"},
    "rate_large": {"fallen": "lower optimizer.learning_rate, since the held-out reward fell from"},
    "rate_small": {"unchanged": "raise optimizer.learning_rate or optimizer.sigma"},
    "cut": {"cut": "95% of the answers were cut off at sampling.max_tokens: raise it"},
    "constant": {
        "equal": "differ, have the reward tell them apart",
        "unchanged": "nothing was learned",
    },
    "never": {"zero": "whether the reward takes right answers", "unchanged": "nothing was learned"},
    "lacking": {"few": "have the reward return the same metrics for every answer"},
    "chance": {"luck": "since no reward rose: raise optimizer.sigma (now 0.01), or ask more probl"},
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
    found = Findings()
    return [kind for row in rows for kind, _ in found.take(row)]


def found_last(*rows: Mapping[str, float]) -> Sequence[tuple[str, str]]:
    found = Findings()
    for row in rows:
        found.take(row)
    return found.latest


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


def test_a_metric_that_some_answers_lack_is_told_with_its_number_once() -> None:
    few = {**FINE, "env/all/correct": 0.9, "reported/partly/correct": 29.0}
    assert told(few, few) == ["few"]
    (said,) = all_findings([few])
    assert "metrics that others to the same problem do not (correct is over 29 answers)" in said
    # Else it may be a part of a mixture that has it, or problems with nothing to judge.
    assert not told({**FINE, "reported/env/all/first_wins": 29.0})
    assert not told({**FINE, "test/reported/env/all/correct": 29.0})


def test_luck_is_told_where_most_of_many_generations_look_like_it() -> None:
    luck = {**FINE, "genomes/reliability": 0.0}
    assert told(*[luck] * 13) == []
    assert told(*[luck] * 14) == ["luck"]
    assert told(*[luck, luck, FINE, FINE, luck] * 20) == [], "two fifths have a signal"
    assert told(*[FINE] * 6, *[luck] * 14) == ["luck"]


def test_a_run_that_rises_is_not_told_that_its_steps_are_luck() -> None:
    luck = {**FINE, "genomes/reliability": 0.0}
    low, high = ({**luck, "test/reward/mean": reward} for reward in (0.4, 0.6))
    assert told(low, *[luck] * 9, high, *[luck] * 12) == []
    assert "luck" in told(low, *[luck] * 9, low, *[luck] * 12)
    assert told(low, *[luck] * 9, high, *[luck] * 60) == [], "what is learned is no luck"
    fell = {**luck, "test/reward/mean": 0.39}
    assert told(low, *[luck] * 9, high, fell, *[luck] * 12) == ["luck"], "it is lost again"


def test_rewards_of_generations_that_rise_are_no_luck() -> None:
    luck = {**FINE, "genomes/reliability": 0.0}
    noise = [0.35, 0.44, 0.4, 0.38, 0.45]
    flat = [{**luck, "reward/mean": reward} for reward in noise * 6]
    assert told(*flat) == ["luck"]
    rising = [{**row, "reward/mean": row["reward/mean"] + g / 100} for g, row in enumerate(flat)]
    assert told(*rising) == []
    by_objective = [{**row, "objective/mean": g - 50.0} for g, row in enumerate(flat)]
    assert told(*by_objective) == []


@pytest.mark.parametrize("path", LEARNED, ids=lambda path: path.stem)
def test_runs_that_learned_are_told_nothing(path: Path) -> None:
    rows = read_metrics(path)
    assert rows[-1]["test/reward/mean"] > rows[0]["test/reward/mean"]
    assert list(all_findings(rows)) == []
    assert told(*rows) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_recorded_run(recipe: str) -> None:
    assert any(path.stem.replace("chat_sums", "chat") == recipe for path in LEARNED), (
        f"python -m benchmarks.recipes record {recipe}"
    )


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_runs_that_could_not_learn_are_told_why(path: Path) -> None:
    found = Findings()
    said = {kind: text for row in read_metrics(path) for kind, text in found.take(row)}
    expected = WHY[path.stem]
    assert said.keys() == expected.keys()
    for kind, change in expected.items():
        assert change in said[kind]


def test_every_failing_run_and_every_kind_of_finding_is_recorded() -> None:
    assert {path.stem for path in FAILED} == set(WHY)
    kinds = {kind for expected in WHY.values() for kind in expected}
    # The step is empty where all genomes earn the same, so that is what is said of it.
    every = {"zero", "equal", "tied", "luck", "far", "fallen", "cut", "few", "unchanged"}
    assert kinds | {"tied"} == every


def test_luck_is_seldom_said_of_runs_that_rise_and_mostly_of_others() -> None:
    """A hundred runs of 50 generations each, with batches that differ as those of recipes do."""

    def num_told(rise: float, share_of_luck: float) -> int:
        draw = random.Random(0)

        def row(g: int) -> Mapping[str, float]:
            reward = 0.4 + rise * min(g / 20, 1) + draw.gauss(0, 0.06)
            is_luck = draw.random() < share_of_luck
            return {**FINE, "reward/mean": reward, "genomes/reliability": 0.0 if is_luck else 0.5}

        return sum("luck" in told(*map(row, range(50))) for _ in range(100))

    assert num_told(0.2, 0.5) == 0, "half of the generations look like luck"
    assert num_told(0.1, 0.5) <= 8
    assert num_told(0.0, 0.65) >= 80


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


def test_of_a_few_generations_without_a_signal_nothing_is_told() -> None:
    nothing = {**FINE, **NO_REWARD}
    assert told(FINE, nothing, FINE, nothing, FINE) == []
    assert told(FINE, nothing, nothing) == ["zero"]
    assert told(*[FINE] * 20, *[nothing] * 10) == [], "half of the last twenty"
    assert told(*[FINE] * 20, *[nothing] * 11) == ["zero"]


def test_what_to_change_where_every_reward_is_zero_depends_on_what_was_earned_before() -> None:
    def said_last(*rows: Mapping[str, float]) -> str:
        ((_, sentence),) = found_last(*rows)
        return sentence

    nothing = {**FINE, **NO_REWARD}
    rare = {**FINE, "reward/mean": 0.01, "reward/max_genome": 0.1, "reward/std_genomes": 0.03}
    assert "whether the reward takes right answers as right" in said_last(nothing, nothing)
    assert said_last(rare, nothing, nothing).endswith(
        "ask more problems per generation, or take easier ones or partial credit"
    )
    assert said_last(FINE, nothing, nothing).endswith(
        "lower optimizer.learning_rate, since the genomes' reward fell from 0.1 to 0"
    )
    solved = {**FINE, "reward/std_genomes": 0.0, "env/all/correct": 1.0}
    assert said_last(solved).endswith("every problem is solved, so take harder ones")


def test_perturbations_that_break_the_model_are_told_where_nothing_rose() -> None:
    broken = {**FINE, "reward/mean": 0.1, "test/reward/mean": 0.4}
    assert told(broken) == [], "its problems may be harder than the held-out ones"
    assert told(broken, {**broken, "test/reward/mean": 0.39}) == ["far"]
    ((_, far), (_, unchanged)) = found_last(broken, broken)
    assert "lower optimizer.sigma" in far and "nothing was learned" in unchanged
    assert told(broken, {**broken, "test/reward/mean": 0.5}) == []
    unsure = {**broken, "test/low/reward/mean": 0.15}
    assert told(unsure, {**unsure, "test/reward/mean": 0.39}) == []
    assert told(*[{"reward/mean": 0.1, "test/reward/mean": 0.4 - g / 9} for g in (0, 1)]) == []


def test_a_centre_is_worse_where_intervals_are_apart() -> None:
    def measured(low: float, mean: float, high: float) -> Mapping[str, float]:
        interval = {"test/low/reward/mean": low, "test/high/reward/mean": high}
        return {**FINE, **interval, "test/reward/mean": mean}

    best = measured(0.5, 0.55, 0.6)
    assert told(measured(0.3, 0.35, 0.4), best, measured(0.4, 0.45, 0.51)) == []
    assert told(measured(0.3, 0.35, 0.4), best, FINE, measured(0.4, 0.44, 0.49)) == ["fallen"]


def test_only_where_the_centre_is_cut_as_well_there_is_too_little_room() -> None:
    cut = {**FINE, "rollouts/truncated": 0.5, "test/reward/mean": 0.4}
    assert told({**cut, "test/rollouts/truncated": 0.0}) == []
    assert told({**cut, "test/rollouts/truncated": 0.3}) == ["cut"]


def test_a_held_out_result_that_did_not_change_at_all_is_told_once() -> None:
    measured = {"test/env/all/correct": 0.25, "test/reward/mean": 0.3}
    assert told({**FINE, **measured}, FINE, {**FINE, **measured}, FINE, measured) == ["unchanged"]
    found = Findings()
    for row in ({**FINE, **measured}, FINE, {**FINE, **measured}, FINE):
        found.take(row)
    assert [kind for kind, _ in found.latest] == ["unchanged"], "a view still shows it"
    found = Findings()
    found.take({**FINE, **NO_REWARD, **measured})
    assert [said for kind, said in found.take(measured) if kind != "far"] == [
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
            row |= {"reward/mean": reward}
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
