"""The recipe pairwise: its additions, its judge, its command line, and a run."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from es_cookbook.plugins.judges.judges import TEMPLATE, BaseJudge, ServerJudge
from es_cookbook.recipes.arithmetic.dataset import Problem, generate_problems
from es_cookbook.recipes.pairwise import additions
from es_cookbook.recipes.pairwise.train_cli import ADDITIONS, CLIConfig
from tests.recipe_problems import APART, parsed, short_run
from tools.bundled import pairwise as warm_start
from tools.rows.additions import draw_pair
from tools.small_model import build_tokenizer

pytestmark = pytest.mark.anyio


def test_the_base_judges_or_another_who_is_asked_in_words() -> None:
    assert CLIConfig().dataset.judge == BaseJudge(template=additions.JUDGED)
    assert parsed(CLIConfig, "dataset.judge=base").dataset.judge.template == TEMPLATE
    server = parsed(CLIConfig, "dataset.judge=server", "dataset.judge.model=m").dataset.judge
    assert server == ServerJudge(model="m")


def test_no_bundled_addition_was_demonstrated() -> None:
    rows = [json.loads(line) for line in ADDITIONS.read_text().splitlines()]
    terms = [tuple(map(int, row["question"].rstrip("=").split("+"))) for row in rows]
    assert {Problem(each).fold for each in terms} == {"test"}


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("236", 1, (1, 1, 0)),
        (" 236\n", 1, (1, 1, 0)),
        ("225", 0, (0, 1, 1)),
        ("", 0, (0, 0, 0)),
        ("choose A", 0, (0, 0, 0)),
        ("236;347+285=225?A", 0, (0, 0, 0)),
        ("٢٣٦", 0, (0, 0, 0)),
        ("9" * 100_000, 0, (0, 0, 0)),
    ],
)
def test_what_is_measured_beside_the_win_rate(
    text: str, reward: float, metrics: tuple[float, float, float]
) -> None:
    earned, found = additions.measured(text, {"question": "347+285=", "answer": "236"})
    assert earned == reward
    names = ("correct", "well_formed", "forgot_carry")
    assert tuple(found[name] for name in names) == metrics


def test_rows_of_ones_own_are_measured_by_their_answer_if_they_have_one() -> None:
    assert additions.measured("Paris", {"question": "?", "answer": "Paris"}) == (
        1.0,
        {"correct": 1.0},
    )
    assert additions.measured("Paris", {"question": "1+1="}) == (0.0, {})


def test_judgements_are_demonstrated_of_different_answers_by_the_better_one_and_the_place() -> None:
    rng = random.Random(0)
    for problem in islice(generate_problems(0, "train"), 50):
        first, second = draw_pair(problem, rng)
        assert first != second
        ahead = warm_start.leaning(problem, first, second)
        behind = warm_start.leaning(problem, second, first)
        assert ahead + behind == pytest.approx(2 * warm_start.BIAS)
    problem = Problem((347, 285))
    assert warm_start.leaning(problem, "236", "225") == 4.5
    assert warm_start.leaning(problem, "225", "226") == -0.5
    assert warm_start.leaning(problem, "246", "136") == 2


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
