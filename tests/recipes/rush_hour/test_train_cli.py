"""The command line of the recipe, a run of two generations, and a small model for it."""

import itertools
import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.rush_hour import warm_start
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems
from es_cookbook.recipes.rush_hour.train_cli import RECIPE, CLIConfig, main
from es_cookbook.recipes.rush_hour.warm_start import CHARACTERS
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.train.program import default_log_path


def parsed(*options: str) -> CLIConfig:
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    return seen[0]


def test_the_config_round_trips_through_json() -> None:
    config = parsed("dataset.size=6", "dataset.reward.moves=optimal", "optimizer.sigma=0.02")
    again = config_from_json(config_to_json(config))
    assert type(again) is CLIConfig
    assert again == config
    assert isinstance(config.dataset, RushHourDatasetBuilder)
    assert (config.dataset.size, config.dataset.reward.moves) == (6, "optimal")
    assert default_log_path(config, "rush_hour").startswith("runs/rush_hour-seed0-")


def test_a_run_of_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = (
        *(f"log_path={run}", "num_generations=2", "optimizer.population_size=4"),
        *("dataset.problems_per_generation=2", "dataset.num_train=6", "dataset.num_test=60"),
        "trackers=JsonlTrackerBuilder",
    )
    run_cli(main, CLIConfig, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    rows = read_metrics(run / "metrics.jsonl")
    for tag in ("all", "easy", "medium", "hard"):
        assert {f"test/env/{tag}/correct", f"test/env/{tag}/optimal"} <= rows[-1].keys()
    assert all({"env/all/legal", "env/all/stops_early"} <= row.keys() for row in rows[:2])
    before = {name: rows[0][f"test/env/all/{name}"] for name in ("correct", "stops_early")}
    assert rows[0]["test/env/all/well_formed"] > 0.97
    assert before["correct"] > 0.1 and before["stops_early"] > 0.4, "the model half knows the task"


def test_the_bundled_model_is_small() -> None:
    assert sum(path.stat().st_size for path in RECIPE.model.iterdir()) < 4_000_000


def test_the_warm_start_writes_a_model_that_the_recipe_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    few = {"num_boards": 6, "num_measured": 3, "steps": 2, "batch_size": 4}
    warm_start.main(warm_start.Config(output=str(output), size=4, **few))
    assert "fold 1: correct 0.0%" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(output).num_parameters() < 1_000_000
    with pytest.raises(ConfigError, match="output must be a new directory"):
        warm_start.main(warm_start.Config(output=str(output)))


def problems(count: int) -> list[Problem]:
    return list(itertools.islice(generate_problems(0, range(10), size=5, max_moves=8), count))


def test_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    for problem in problems(30):
        text = warm_start.demonstrate(problem)
        (metrics,) = warm_start.grades([problem], [text])
        assert metrics["optimal"] == metrics["well_formed"] == 1
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) < 48


def test_careless_demonstrations_stop_early_the_more_often_the_lower_the_target() -> None:
    rng = random.Random(0)
    shares: dict[int, list[bool]] = {}
    for problem in problems(150):
        leaves_out = [warm_start.leaves_out_the_last(problem, rng) for _ in range(40)]
        if len(problem.solution or ()) == 1:
            assert not any(leaves_out)
            continue
        shares.setdefault(problem.board.target.start // 5, []).extend(leaves_out)
        (metrics,) = warm_start.grades(
            [problem], [warm_start.demonstrate(problem, without_last=True)]
        )
        assert metrics["stops_early"] == metrics["well_formed"] == 1
    by_row = [sum(shares[row]) / len(shares[row]) for row in range(5)]
    assert by_row == sorted(by_row)
    assert 0.4 < by_row[0] < 0.55 < by_row[2] < 0.7 < by_row[4] < 0.8
