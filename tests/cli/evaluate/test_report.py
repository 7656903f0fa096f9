"""The table shows the numbers in 80 columns, and says what must be known to read them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from es_cookbook.cli.evaluate.measuring import Evaluation, Setting
from es_cookbook.cli.evaluate.report import measured, report
from es_cookbook.population.results import Results
from es_cookbook.rl.objectives import Outcomes
from es_cookbook.rl.types import SamplingParams
from tests.tiny_run import TinyConfig

CONFIG = TinyConfig(
    model_name="", log_path="", sampling=SamplingParams(max_tokens=1), eval_temperature=0.5, seed=3
)
SETTING = Setting("countdown", CONFIG, "test")


def evaluation(correct_P: Sequence[float], lost: Sequence[str] = ()) -> Evaluation:
    values = np.array(correct_P, dtype=np.float64)[:, None, None]
    results = Results(
        [str(p) for p in range(len(correct_P))],
        [()] * len(correct_P),
        Outcomes(1234.5 * values, values, {"correct": values}),
        [list(lost)] + [[]] * (len(correct_P) - 1),
    )
    return Evaluation("runs/\x1bmine", 1, {}, {}, results)


def shown(first: Evaluation, second: Evaluation | None = None) -> str:
    text = report(measured(SETTING, first, second, "correct"), "correct")
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_shares_are_percents_and_their_differences_points() -> None:
    text = shown(evaluation([1] * 30 + [0] * 10), evaluation([0] * 20 + [1] * 15 + [0] * 5))
    assert text.splitlines()[:2] == [
        r"runs/\x1bmine after 1 generation",
        "40 held-out problems of countdown, 1 attempt at each, temperature 0.5, at most 1",
    ]
    assert "\ncorrect                 75.0 %   59.8 to 85.8 %        Wilson\n" in text
    assert "\nreward                   925.9   " in text
    assert "\ncorrect                  75.0 %     37.5 %      +37.5   +" in text
    assert "correct: better on 20 problems, worse on 5, the same on 15; p = 0.0041" in text
    assert text.index("\ncorrect ") < text.index("\nreward "), "what was asked for comes first"
    assert "few" not in text


def test_a_metric_that_some_answers_lack_shows_its_count() -> None:
    text = shown(evaluation([1.0] * 8 + [0.0] * 20 + [np.nan]))
    assert "answers" not in text  # One is lost, of which nothing is known.
    some = evaluation([1.0] * 8 + [0.0] * 21)
    values = some.results.outcomes.metrics["correct"].copy()
    values[-3:] = np.nan
    outcomes = dataclasses.replace(some.results.outcomes, metrics={"correct": values})
    some = dataclasses.replace(some, results=dataclasses.replace(some.results, outcomes=outcomes))
    head, correct, reward = shown(some).splitlines()[5:8]
    assert head.split()[-1] == "answers"
    assert (correct.split()[0], correct.split()[-1]) == ("correct", "26")
    assert (reward.split()[0], reward.split()[-1]) == ("reward", "29")
    assert "correct: not reported by all 29 answers; the mean is over those that" in shown(some)


def test_intervals_of_few_problems_are_called_too_narrow() -> None:
    few = " ".join(shown(evaluation([1] * 5), evaluation([1] * 5)).split())
    assert "5 problems are few: intervals by bootstrap are too narrow." in few


def test_numbers_are_unknown_if_all_rollouts_are_lost() -> None:
    text = shown(evaluation([np.nan], ["TimeoutError: " + "long " * 200]))
    assert "\nreward                 unknown   unknown" in text
    assert "lost: 1 of 1 rollout, left out above\n  1 x TimeoutError: long long" in text
