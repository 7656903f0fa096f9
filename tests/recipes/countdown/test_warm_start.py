"""The bundled model: how it is made, and what is bundled."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import es_cookbook.recipes.countdown as countdown
from es_cookbook.baselines import small_model
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.countdown import warm_start
from es_cookbook.recipes.countdown.problems import generate_problems, solve
from es_cookbook.rl.rewards.arithmetic import CountdownReward, grade_countdown

BUNDLED = Path(countdown.__file__).parent / "model"


def _examples(count: int) -> list[tuple[warm_start.Problem, warm_start.Solution]]:
    problems = islice(generate_problems(0, "train"), count)
    return [(p, s) for p in problems if (s := solve(p.numbers, p.target)) is not None]


def test_clean_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = small_model.build_tokenizer(warm_start.CHARACTERS)
    for problem, solution in _examples(300):
        text = warm_start.demonstrate(problem, solution, random.Random(0))
        grade = grade_countdown(text, problem.numbers, problem.target, CountdownReward())
        assert grade.reward == 1.0
        assert len(tokenizer.encode(text + small_model.EOS)) <= warm_start.MAX_ANSWER_TOKENS


def test_careless_demonstrations_are_often_wrong_in_form_and_often_in_substance() -> None:
    rng = random.Random(0)
    grades = [
        grade_countdown(
            warm_start.demonstrate_carelessly(problem, solution, rng),
            problem.numbers,
            problem.target,
            CountdownReward(),
        )
        for problem, solution in _examples(3000)
    ]
    correct = sum(grade.correct for grade in grades) / len(grades)
    badly_formed = sum(not grade.well_formed for grade in grades) / len(grades)
    only_wrong = sum(grade.well_formed and not grade.correct for grade in grades) / len(grades)
    assert 0.25 < correct < 0.45
    assert badly_formed > 0.4
    assert only_wrong > 0.05


def test_whole_recipe_is_seeded_and_loads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_start, "NUM_TEST", 4)
    before = torch.random.get_rng_state()
    weights: list[bytes] = []
    for name in ("a", "b"):
        config = warm_start.Config(
            output=str(tmp_path / name),
            ability_steps=2,
            habit_steps=1,
            batch_size=4,
            num_problems=20,
        )
        warm_start.main(config)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert "habits" in capsys.readouterr().out
    assert torch.equal(before, torch.random.get_rng_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.num_parameters() < 1_000_000


def test_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output must be a new directory"):
        warm_start.main(warm_start.Config(output=str(tmp_path)))
    with pytest.raises(ConfigError, match="output must be a new directory"):
        warm_start.main(warm_start.Config(output=str(tmp_path / "none" / "model")))


def test_bundled_model_can_and_often_does_not() -> None:
    """The point of the warm start; the README's numbers come from the command it names."""
    tokenizer = small_model.build_tokenizer(warm_start.CHARACTERS)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED)
    test_P = list(islice(generate_problems(0, "test"), 60))
    measured = warm_start.measure(model, tokenizer, test_P, seed=0)
    assert 0.2 < measured.greedy["correct"] < 0.6
    assert measured.pass_at_8 > measured.greedy["correct"]
    assert measured.greedy["format"] < 1.0


def test_bundled_files_fit_in_the_package() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 4_000_000
