"""The bundled model: how it is made, and what is bundled."""

import random
from itertools import islice

from transformers import AutoModelForCausalLM

from es_cookbook.baselines import small_model
from es_cookbook.recipes.countdown import warm_start
from es_cookbook.recipes.countdown.problems import generate_problems, solve
from es_cookbook.recipes.countdown.train_cli import RECIPE
from es_cookbook.recipes.warm_start import measured
from es_cookbook.rl.rewards.arithmetic import CountdownReward, grade_countdown


def _examples(count: int) -> list[tuple[warm_start.Problem, warm_start.Solution]]:
    problems = islice(generate_problems(0, "train"), count)
    return [(p, s) for p in problems if (s := solve(p.numbers, p.target)) is not None]


def test_clean_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = small_model.build_tokenizer(warm_start.CHARACTERS)
    for problem, solution in _examples(300):
        text = warm_start.demonstrate(solution)
        grade = grade_countdown(text, problem.numbers, problem.target, CountdownReward())
        assert grade.reward == 1.0
        assert len(tokenizer.encode(text + small_model.EOS)) <= 28


def test_careless_demonstrations_are_often_wrong_in_form_and_often_in_substance() -> None:
    rng = random.Random(0)
    grades = [
        grade_countdown(
            warm_start.demonstrate_carelessly(problem, solution, rng),
            problem.numbers,
            problem.target,
            CountdownReward(),
        ).metrics
        for problem, solution in _examples(3000)
    ]
    correct = sum(grade["correct"] for grade in grades) / len(grades)
    badly_formed = sum(not grade["well_formed"] for grade in grades) / len(grades)
    wrong = (grade["well_formed"] and not grade["correct"] for grade in grades)
    only_wrong = sum(wrong) / len(grades)
    assert 0.25 < correct < 0.45
    assert badly_formed > 0.4
    assert only_wrong > 0.05


def test_bundled_model_can_and_often_does_not() -> None:
    """The point of the warm start; the README's numbers come from the command it names."""
    tokenizer = small_model.build_tokenizer(warm_start.CHARACTERS)
    model = AutoModelForCausalLM.from_pretrained(RECIPE.model)
    found = measured(RECIPE, model, tokenizer, samples=8, num_test=60)
    assert 0.2 < found["correct"] < 0.6
    assert found["pass_at_8"] > found["correct"]
    assert found["format"] < 1.0
