"""The study of docs/es_vs_grpo.md: how it tunes, reads curves and states ratios; and the page."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import study_tables
from benchmarks.study import (
    CONTESTANTS,
    FOLD,
    TASKS,
    TUNING_FOLD,
    Plan,
    Study,
    at_edge,
    evaluations_of,
    tune,
)
from es_cookbook.evolution.schedules import Constant
from es_cookbook.rl.data.generated import FoldedDatasetBuilder

GOLD = {"es": 65 * 8, "low_rank_gold": 65 * 8, "gold": 32}
DENSE = {"es_at_scale": 30 * 16, "dense_auto": 30 * 16}
GRADIENTS = {"group": 16 * 8, "grpo": 16 * 8}
SPACES = {"rewards": 64 * 16, "best": 136 * 12, "low_rank": 32 * 16}
EVALUATIONS = SPACES | GOLD | DENSE | GRADIENTS


@pytest.mark.parametrize("page", study_tables.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_results(page: Path) -> None:
    text, made = page.read_text(), study_tables.PAGES[page]()
    assert study_tables.with_text(text, made) == text, "run `python -m benchmarks.study tables`"


def test_the_readme_leaves_out_what_it_has_no_name_for(tmp_path: Path) -> None:
    for path in study_tables.RESULTS.glob("*.json"):
        task = json.loads(path.read_text())
        entry = json.loads(json.dumps(next(iter(task["contestants"].values()))))
        for run in entry["runs"]:
            run["machine"]["cpu"] = "another one"
            run |= {"load": 2.0, "copied": [8.1, 9.0]}
        task["contestants"]["grpo"] = entry
        (tmp_path / path.name).write_text(json.dumps(task))
    said = study_tables.tables(tmp_path)
    assert "another one" in said and "load 2.0 to 2.0; memory copied at 8.1 to 9.0 GB/s:" in said
    assert study_tables.summary(tmp_path) == study_tables.summary()


@pytest.mark.parametrize("task", TASKS)
def test_all_contestants_are_tuned_on_one_fold_and_measured_on_another_at_constant_rates(
    task: str,
) -> None:
    study = Study(Plan(common={"model_name": "countdown"}), task)
    for name, contestant in CONTESTANTS.items():
        for tuning, fold in ((True, TUNING_FOLD), (False, FOLD)):
            config = study.config(name, 0, 0.25, tuning=tuning)
            assert isinstance(config.dataset, FoldedDatasetBuilder) and config.dataset.fold == fold
            part, _, rate = f".{contestant.rate}".rpartition(".")
            holder = getattr(config, part[1:]) if part else config
            assert getattr(holder, rate) == 0.25
            assert getattr(holder, f"{rate}_schedule") == Constant()
        assert evaluations_of(study.config(name, 0, None, tuning=True)) == EVALUATIONS[name]
    assert len({0, 1, TUNING_FOLD, FOLD}) == 4, "settings were chosen on folds 0 and 1"
    for above, below, _ in study_tables.PAIRS:
        assert CONTESTANTS[above].told == CONTESTANTS[below].told


def test_all_have_as_many_trials_and_no_best_rate_is_at_an_edge() -> None:
    best = {"middle": 1.0, "high": 40.0, "low": 0.02}
    asked: list[tuple[str, float]] = []

    def trial(name: str, rate: float | None) -> tuple[float, float]:
        rate = 1.0 if rate is None else rate
        asked.append((name, rate))
        return rate, -abs(math.log(rate / best[name]))

    tried_of = tune([*best], trial)
    assert len({len(tried) for tried in tried_of.values()}) == 1
    for name, tried in tried_of.items():
        assert not at_edge(tried)
        assert math.isclose(max(tried, key=lambda rate: tried[rate]), best[name], rel_tol=0.7)
    assert len(asked) == len(set(asked)), "no trial is made twice"
    endless = tune(["up"], lambda _, rate: (rate or 1.0, rate or 1.0), longest=6)
    assert len(endless["up"]) == 6 and at_edge(endless["up"])


def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    base, above, below, questions = 0.1, 0.5, 0.3, 400
    within = 0
    for _ in range(400):
        asked = rng.random(questions)  # the same questions for all, of unequal difficulty

        def score(p: float, asked: np.ndarray = asked) -> float:
            return float(np.mean(asked < p))

        scores = [[score(p + rng.normal(0, 0.02)) for _ in range(3)] for p in (above, below)]
        _, low, high = study_tables.ratio_of_gains(scores[0], scores[1], score(base), questions)
        within += low <= (above - base) / (below - base) <= high
    assert within >= 0.95 * 400
    exact = study_tables.ratio_of_gains([0.5] * 3, [0.3] * 3, 0.1, 10**9)
    assert exact == pytest.approx((2.0, 2.0, 2.0), abs=1e-3)
    ratio, low, high = study_tables.ratio_of_gains(
        [0.12, 0.13, 0.12], [0.09, 0.08, 0.09], 0.075, 400
    )
    assert ratio > 3 and (low, high) == (-math.inf, math.inf), "a gain of one point may be none"
    assert study_tables.quantile_of_t(0.975, math.inf) == pytest.approx(1.96, abs=1e-3)
    assert study_tables.quantile_of_t(0.975, 2) == pytest.approx(4.303, rel=0.035)
