"""The command line of the recipe, a run of two generations, and a small model for it."""

import itertools
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.baselines.small_model import build_model, build_tokenizer, save
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.rush_hour import warm_start
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder
from es_cookbook.recipes.rush_hour.generate import generate_problems
from es_cookbook.recipes.rush_hour.rewards import RushHourReward, grade_rush_hour
from es_cookbook.recipes.rush_hour.train_cli import CLIConfig, main
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
    tokenizer = build_tokenizer(CHARACTERS)
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    run = tmp_path / "run"
    options = (
        f"model_name={tmp_path / 'model'}",
        f"log_path={run}",
        *("num_generations=2", "optimizer.population_size=4", "sampling.max_tokens=8"),
        *("dataset.size=4", "dataset.prompt=compact", "dataset.problems_per_generation=2"),
        *("dataset.num_train=6", "dataset.num_test=3", "trackers=JsonlTrackerBuilder"),
    )
    run_cli(main, CLIConfig, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    rows = read_metrics(run / "metrics.jsonl")
    for tag in ("all", "easy", "medium", "hard"):
        assert {f"test/env/{tag}/correct", f"test/env/{tag}/optimal"} <= rows[-1].keys()
    assert all({"env/all/legal", "env/all/well_formed"} <= row.keys() for row in rows[:2])


def test_the_warm_start_writes_a_model_that_the_recipe_loads(tmp_path: Path) -> None:
    output = tmp_path / "model"
    warm_start.main(warm_start.Config(output=str(output), size=4, num_boards=6, steps=2))
    assert AutoModelForCausalLM.from_pretrained(output).num_parameters() < 1_000_000
    with pytest.raises(ConfigError, match="output must be a new directory"):
        warm_start.main(warm_start.Config(output=str(output)))


def test_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    for problem in itertools.islice(generate_problems(0, "train", size=5, max_moves=8), 30):
        text = warm_start.demonstrate(problem)
        grade = grade_rush_hour(text, problem.board, len(problem.solution or ()), RushHourReward())
        assert grade.reward == pytest.approx(1)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) < 40
