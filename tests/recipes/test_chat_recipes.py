"""What the recipes of many turns have in common: short runs, warm starts and bundled models."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.recipes.calculator import train_cli as calculator
from es_cookbook.recipes.calculator import warm_start as calculator_start
from es_cookbook.recipes.chat_warm_start import Config, chat_tokenizer
from es_cookbook.recipes.guess_number import train_cli as guess_number
from es_cookbook.recipes.guess_number import warm_start as guess_number_start
from es_cookbook.recipes.search import train_cli as search
from es_cookbook.recipes.search import warm_start as search_start
from es_cookbook.runs.tracking.jsonl import read_metrics


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One of them: how it is trained, how its small model is made, and what it measures."""

    config: type[train.Config]
    main: Callable[[Any], None]
    model: Path
    make: Callable[[Any], None]
    make_config: type[Config]
    tokenizer: Qwen2Tokenizer
    prompt: str
    metric: str
    option: str


RECIPES = {
    "guess_number": Recipe(
        guess_number.CLIConfig,
        guess_number.main,
        guess_number.RECIPE.model,
        guess_number_start.main,
        guess_number_start.Config,
        chat_tokenizer(guess_number_start.CHARACTERS),
        "10..30=",
        "turns",
        "dataset.chat.max_tokens=9",
    ),
    "calculator": Recipe(
        calculator.CLIConfig,
        calculator.main,
        calculator.RECIPE.model,
        calculator_start.main,
        Config,
        chat_tokenizer(calculator_start.CHARACTERS, calculator_start.CALL),
        "12+34*5=",
        "tool_calls",
        "dataset.chat.tools_in=system",
    ),
    "search": Recipe(
        search.CLIConfig,
        search.main,
        search.RECIPE.model,
        search_start.main,
        Config,
        chat_tokenizer(search_start.CHARACTERS, search_start.WORDS),
        "river tese?",
        "tool_calls",
        "dataset.chat.tools_in=system",
    ),
}
ALL = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@ALL
def test_the_config_round_trips_through_json(recipe: Recipe) -> None:
    seen: list[train.Config] = []
    run_cli(seen.append, recipe.config, ["dataset.prompt=words", recipe.option])
    assert config_from_json(config_to_json(seen[0])) == seen[0]


@ALL
def test_a_run_of_two_generations(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        *("num_generations=2", "optimizer.population_size=4", "dataset.problems_per_generation=2"),
        *("dataset.num_train=6", "dataset.num_test=3", "trackers=JsonlTrackerBuilder"),
        f"log_path={tmp_path / 'run'}",
    )
    run_cli(recipe.main, recipe.config, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert {f"test/env/all/{recipe.metric}", "test/env/all/well_formed"} <= rows[-1].keys()
    assert rows[-1]["test/env/all/well_formed"] > 0.5


@ALL
def test_the_warm_start_writes_a_model_that_talks(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe.make_config(output=str(tmp_path / "model"), chats=4, steps=2, batch_size=4)
    recipe.make(config)
    for model in (tmp_path / "model", recipe.model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        assert tokenizer.chat_template == recipe.tokenizer.chat_template
        assert len(tokenizer) == len(recipe.tokenizer)
        assert tokenizer.encode(recipe.prompt) == recipe.tokenizer.encode(recipe.prompt)


@ALL
def test_bundled_files_fit_in_the_package(recipe: Recipe) -> None:
    assert sum(path.stat().st_size for path in recipe.model.iterdir()) <= 4_000_000
