"""Evolution strategies beside gradients: who runs with what, what is chosen, what is kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from es_cookbook import Config, FullRank
from es_cookbook.common.cli import run_with_fields
from es_cookbook.evolution.fitness import ZScore
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.plugins.gradients.commands.compare_gradients import (
    AnyConfig,
    CompareGradients,
    contestants,
    rollouts,
)
from es_cookbook.recipes.arithmetic.train_cli import CLIConfig
from es_cookbook.rl.surrogate import Surrogate
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.said import refused, typed

ARITHMETIC = ("recipe=arithmetic", "dataset.num_test=20", "dataset.problems_per_generation=4")


def contestants_of(*options: str) -> Mapping[str, tuple[AnyConfig, Sequence[float]]]:
    made: dict[str, tuple[AnyConfig, Sequence[float]]] = {}
    run_with_fields(
        lambda *given: made.update(contestants(*given)[0]), CompareGradients, "", options
    )
    return made


def test_all_begin_as_the_recipe_and_make_as_many_rollouts() -> None:
    found = contestants_of("contestants=es,surrogate,group,ppo,expert", *ARITHMETIC)
    assert {rollouts(config) for config, _ in found.values()} == {256 * 4 * 12}
    es, surrogate, group = (found[name][0] for name in ("es", "surrogate", "group"))
    assert isinstance(es, Config) and isinstance(surrogate, Config)
    assert es.surrogate is None and surrogate.surrogate == Surrogate(attempts=256)
    assert es.optimizer == surrogate.optimizer == CLIConfig().optimizer
    assert isinstance(group, policy_gradient.Config) and group.model_name == es.model_name
    methods = [type(found[name][0].method).__name__ for name in ("ppo", "expert")]
    assert methods == ["PPO", "Expert"]


def test_at_equal_seconds_rollouts_may_differ() -> None:
    gold = "contestants=es,es_at_scale,gold", "gold.num_generations=30"
    assert "contestants must make the same number" in refused(
        "compare-gradients", *ARITHMETIC, *gold
    )
    auto = "es_at_scale.optimizer.sigma=auto"
    found = contestants_of(*ARITHMETIC, *gold, auto, "at_equal=seconds")
    counts = {name: rollouts(config) for name, (config, _) in found.items()}
    assert counts == {"es": 256 * 4 * 12, "es_at_scale": 30 * 4 * 12, "gold": 4 * 30}
    plain = found["es_at_scale"][0]
    assert isinstance(plain, Config) and plain.fitness == ZScore()
    assert plain.search_space == FullRank() and getattr(plain.optimizer, "sigma", None) == "auto"
    assert type(found["gold"][0].method).__name__ == "Gold"


def test_an_option_holds_for_all_or_with_a_name_before_it_for_one() -> None:
    found = contestants_of(
        *ARITHMETIC,
        "num_generations=6",
        "surrogate.num_generations=12",
        "surrogate.surrogate.attempts=16",
        "es.optimizer.population_size=32",
        "group.attempts=32",
        "factors=1,2",
        "es.factors=0.5",
    )
    generations = {name: config.num_generations for name, (config, _) in found.items()}
    assert generations == {"es": 6, "surrogate": 12, "group": 6}
    assert {rollouts(config) for config, _ in found.values()} == {6 * 32 * 4}
    factors = {name: tuple(tried) for name, (_, tried) in found.items()}
    assert factors == {"es": (0.5,), "surrogate": (1.0, 2.0), "group": (1.0, 2.0)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["contestants=es,grup"], "unknown contestant 'grup': did you mean 'group'?"),
        (["factors=0,1"], "factors must be positive"),
        (["seeds=0,1000"], "seeds and tuning_seed must be different ones"),
        (["metric=reward/mean"], "metric must be a held-out one"),
        (["ppo.attempts=3"], "ppo.attempts is an option of a contestant that is not compared"),
        (["group.seed=3"], "seed cannot be given: the comparison sets it"),
        (["group.attempts=3"], "contestants must make the same number of rollouts"),
        (["second=math", "second.dataset.nom_test=1"], "nom_test"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_sentence(options: list[str], said: str) -> None:
    assert said in refused("compare-gradients", *ARITHMETIC, *options)


@pytest.mark.slow
def test_a_comparison_runs_chooses_measures_and_goes_on_without_running_again(
    tmp_path: Path,
) -> None:
    options = (
        *ARITHMETIC,
        f"log_path={tmp_path}",
        "contestants=es,group",
        "num_generations=2",
        "dataset.num_train=64",
        "es.optimizer.population_size=8",
        "group.attempts=6",
        "at_equal=seconds",
        "seeds=0",
        "factors=1",
        "group.factors=0.5,1000",
        "pass_at=2",
        "second=arithmetic",
        *("second.dataset.num_test=10", "second.dataset.num_train=64"),
    )
    typed("compare-gradients", *options)
    found: dict[str, Any] = json.loads((tmp_path / "comparison.json").read_text())
    assert set(found["contestants"]) == {"es", "group"}
    group = found["contestants"]["group"]
    assert group["learning_rate"] == pytest.approx(1.5e-4), "the other one destroys the model"
    assert set(group["tried"]) == {"0.5", "1000"}
    assert found["base"]["test/env/kl/kl"] == pytest.approx(0, abs=1e-9)
    for name, each in found["contestants"].items():
        (final,) = each["finals"]
        assert final["test/env/kl/kl"] > 0, name
        assert {"test/pass@1", "test/pass@2"} <= set(final)
        assert final["second/test/problems"] == 10
    for factor, reward in group["tried"].items():
        rows = read_metrics(tmp_path / f"group-x{factor}-seed1000/metrics.jsonl")
        assert reward == rows[-2]["reward/mean"], "of the last quarter, which is one generation"
    races = {name: each["race"] for name, each in found["contestants"].items()}
    assert [race["rollouts_M"][0] for race in races.values()] == [0, 0]
    least = min(race["seconds_R_M"][0][-1] for race in races.values())
    rows = [line.split("|")[1:6] for line in (tmp_path / "comparison.md").read_text().splitlines()]
    shown = {name.strip(): [cell.strip() for cell in cells] for name, *cells in filter(None, rows)}
    for name, race in races.items():
        (seconds_M,), (scores_M,) = race["seconds_R_M"], race["scores_R_M"]
        then = [score for t, score in zip(seconds_M, scores_M, strict=True) if t <= least][-1]
        end, at_equal_seconds = (f"{100 * score:.1f} %" for score in (scores_M[-1], then))
        spent = f"{seconds_M[-1]:.0f}", str(race["rollouts_M"][-1])
        assert shown[name] == [end, at_equal_seconds, *spent]
        assert shown["base"][0] == f"{100 * scores_M[0]:.1f} %"
    assert (tmp_path / "comparison-rollouts.svg").exists()
    assert (tmp_path / "comparison-seconds.png").exists()
    before = (tmp_path / "comparison.json").read_bytes()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    base = (tmp_path / "base.final.json").stat().st_mtime_ns
    typed("compare-gradients", *options)
    assert made == {path: path.stat().st_mtime_ns for path in made}, "nothing was run again"
    assert base == (tmp_path / "base.final.json").stat().st_mtime_ns
    assert (tmp_path / "comparison.json").read_bytes() == before
    typed("compare-gradients", *options, "pass_at=3")
    assert made == {path: path.stat().st_mtime_ns for path in made}
    again: dict[str, Any] = json.loads((tmp_path / "comparison.json").read_text())
    for each in again["contestants"].values():
        assert "test/pass@3" in each["finals"][0]


@pytest.mark.slow
def test_a_trial_that_diverges_does_not_end_the_comparison(tmp_path: Path) -> None:
    options = (*ARITHMETIC, f"log_path={tmp_path}", "contestants=gold", "at_equal=seconds")
    sizes = ("num_generations=3", "dataset.num_train=64", "seeds=0", "pass_at=2")
    done = typed("compare-gradients", *options, *sizes, "factors=1,1e29")
    assert "gold: training has diverged: " in done.stdout
    found = json.loads((tmp_path / "comparison.json").read_text())["contestants"]["gold"]
    assert found["tried"]["1e+29"] is None and found["learning_rate"] == pytest.approx(3e-4)
    assert "**, 3e+25: diverged" in (tmp_path / "comparison.md").read_text()
    done = typed("compare-gradients", *options, *sizes, "factors=1e29,1e30")
    assert done.returncode == 1
    assert "gold: training has diverged with all factors; give smaller ones" in done.stderr
