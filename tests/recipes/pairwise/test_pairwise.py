"""The recipe pairwise: its additions, its judge, its command line, and a run."""

import json
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.recipes.arithmetic.dataset import Problem, generate_problems
from es_cookbook.recipes.pairwise import additions
from es_cookbook.recipes.pairwise.train_cli import ADDITIONS, CLIConfig
from tests.recipe_problems import APART, short_run
from tools.bundled import pairwise as warm_start
from tools.small_model import build_tokenizer


def test_no_bundled_addition_was_demonstrated() -> None:
    rows = [json.loads(line) for line in ADDITIONS.read_text().splitlines()]
    terms = [tuple(map(int, row["question"].rstrip("=").split("+"))) for row in rows]
    assert {Problem(each).fold for each in terms} == {"test"}


def test_a_run_of_two_generations_pays_the_win_rate_alone(tmp_path: Path) -> None:
    judge = "dataset.judge.least_mass=0", f"dataset.judge.template={additions.JUDGED}"
    options = *APART, "optimizer.population_size=6", *judge
    first, second, last = short_run("pairwise", tmp_path / "run", *options)
    for row in (first, second):
        assert row["reward/mean"] == pytest.approx(row["env/all/win_rate"])
        assert row["env/all/win_rate"] == pytest.approx(0.5), "what one wins another loses"
        assert row["env/all/judgements"] >= 2
        assert {"env/all/first_wins", "env/all/swap_changes", "env/all/correct"} <= row.keys()
    assert first["test/env/all/win_rate"] == 0.5, "the centre is the base"
    assert last["test/env/all/win_rate"] != 0.5


def test_the_bundled_model_judges_better_than_it_answers_and_prefers_the_first_place() -> None:
    """The point of the warm start; the README's numbers come from the command it names."""
    model = AutoModelForCausalLM.from_pretrained(CLIConfig().model_name)
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    held_out = list(islice(generate_problems(0, "development"), 100))
    found = warm_start.measure(model, tokenizer, held_out, seed=0)
    assert found["digits alone"] >= 0.98
    assert 0.3 < found["correct"] < 0.65
    assert found["better answer wins, both orders"] > found["correct"] + 0.1
    assert found["first place wins"] > 0.6
