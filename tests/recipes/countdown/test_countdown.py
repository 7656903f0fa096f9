"""Countdown: problems, the data set, what answers earn, and the bundled model."""

import random
from itertools import islice
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import es_cookbook.recipes.countdown as countdown
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.countdown.arithmetic import (
    PAPER_REWARD,
    CountdownReward,
    evaluate,
    grade_countdown,
)
from es_cookbook.recipes.countdown.dataset import (
    CountdownDatasetBuilder,
    CountdownEnv,
    Problem,
    Split,
    generate_problems,
    question,
    solve,
)
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Observation
from tests.recipe_problems import Builders, build, check_second_row_is_named
from tools import small_model
from tools.bundled import countdown as warm_start
from tools.bundled.countdown import CHARACTERS
from tools.small_model import build_tokenizer
from tools.warm_start import measured


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(1, 99))
def test_solutions_use_each_number_once_and_hit_the_target(numbers: list[int], target: int) -> None:
    solution = solve(numbers, target)
    if solution is None:
        return
    evaluated = evaluate(solution.expression)
    assert evaluated is not None
    value, used = evaluated
    assert value == target and sorted(used) == sorted(numbers)
    step, _, result = solution.first_step.partition("=")
    first = evaluate(step)
    assert first is not None
    assert str(first[0]) == result


@pytest.mark.parametrize(
    ("numbers", "target", "solvable"),
    [
        ([8, 8, 3, 3], 24, True),  # 8/(3-8/3): only through a fraction
        ([1, 5, 5, 5], 24, True),  # 5*(5-1/5)
        ([1, 1, 1, 1], 24, False),
        ([3, 50], -47, True),
        ([7], 7, True),
        ([7], 8, False),
    ],
)
def test_what_can_be_solved(numbers: list[int], target: int, solvable: bool) -> None:
    assert (solve(numbers, target) is not None) == solvable


def test_solution_does_not_depend_on_the_order_of_the_numbers() -> None:
    assert solve([4, 27, 19], 50) == solve([27, 19, 4], 50)


@pytest.mark.parametrize("split", ["train", "test"])
def test_stream_is_seeded_distinct_solvable_and_of_its_split(split: Split) -> None:
    def make(seed: int) -> list[Problem]:
        stream = generate_problems(seed, split, num_numbers=(3, 4), max_number=20, max_target=50)
        return list(islice(stream, 60))

    problems = make(3)
    assert problems == make(3)
    assert problems != make(4)
    assert len({problem.key for problem in problems}) == 60
    assert {len(problem.numbers) for problem in problems} == {3, 4}
    for problem in problems:
        assert (problem.fold == 0) == (split == "test")
        assert all(1 <= number <= 20 for number in problem.numbers)
        assert 1 <= problem.target <= 50
        assert solve(problem.numbers, problem.target) is not None


pytestmark = pytest.mark.anyio


async def _build(
    tokenizer: PreTrainedTokenizerBase | None = None, **fields: object
) -> tuple[Builders, Builders]:
    defaults: dict[str, object] = {"problems_per_generation": 1, "num_train": 50, "num_test": 20}
    builder = CountdownDatasetBuilder(**{**defaults, **fields})  # pyright: ignore
    train, test = await build(builder, tokenizer or build_tokenizer(CHARACTERS))
    return list(train.builders), test


def _env(builder: ProblemGroupBuilder) -> CountdownEnv:
    env = builder.make_env()
    assert isinstance(env, CountdownEnv)
    return env


ROWS: list[dict[str, object]] = [
    {"numbers": [a, b, 2], "target": a * b + 2} for a in range(3, 13) for b in range(a, 13)
]


async def test_parquet_with_the_hub_sets_columns(tmp_path: Path) -> None:
    path = tmp_path / "hub.parquet"
    columns = {"nums": [row["numbers"] for row in ROWS], "target": [row["target"] for row in ROWS]}
    datasets.Dataset.from_dict(columns).to_parquet(path)
    train, test = await _build(source=str(path))
    assert len(train) + len(test) == len(ROWS)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"numbers": [1, 2]}, "field 'target' is missing"),
        ({"target": 3}, "field 'numbers' or 'nums' is missing"),
        ({"numbers": [1, 2], "target": "3"}, "field 'target' must be a whole number, found '3'"),
        ({"numbers": "1 2", "target": 3}, "field 'numbers' must be a list of whole numbers"),
        ({"numbers": [1, 1, 1], "target": 99}, "no expression of [1, 1, 1] equals 99"),
        ({"numbers": [1, 2], "target": 3, "solution": "1-2"}, "its own solution earns 0.1 of 1"),
        ({"numbers": [1] * 6, "target": 6}, "more than 5 numbers needs a 'solution'"),
    ],
)
async def test_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    given = CountdownDatasetBuilder, build_tokenizer(CHARACTERS), tmp_path / "train.jsonl"
    await check_second_row_is_named(*given, [ROWS[0], row], sentence)


@pytest.mark.parametrize("num_numbers", [(3, 7), ()])
def test_a_problem_has_two_to_four_numbers(num_numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="num_numbers must be one or more of 2, 3 and 4"):
        CountdownDatasetBuilder(num_numbers=num_numbers)


def test_prompts() -> None:
    assert question([19, 27, 4], 50, "compact") == "27,19,4=50\n"
    paper = question([44, 19, 35], 98, "paper")
    assert paper.startswith("Using the numbers [44 19 35], create an equation that equals 98.")
    assert paper.endswith("for example <answer> (1 + 2) / 3 </answer>.")


async def test_prompt_that_ends_in_think_changes_what_is_expected() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>\n"
    train, _ = await _build(tokenizer, prompt="paper", reward=PAPER_REWARD)
    env = _env(train[0])
    assert env.prompt_ends_in_think
    assert train[0].gold is not None
    assert not train[0].gold.startswith("<think>")
    assert env.grade(train[0].gold).reward == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("<think>3*4=12</think><answer>3*4-2</answer>", 1.0, (1.0, 1.0, 1.0, 1.0)),
        ("<think>3*4=12</think><answer>3*4+2</answer>", 0.1, (0.0, 1.0, 1.0, 0.0)),
        ("<think>3*4=12</think><answer>3*4-2=10</answer>", 0.1, (0.0, 1.0, 0.0, 0.0)),
        ("<think>3*4=12<answer>3*4-2</answer>", 0.025, (0.0, 0.25, 0.0, 0.0)),
        ("", 0.0, (0.0, 0.0, 0.0, 0.0)),
    ],
)
async def test_metrics_keep_answer_and_form_apart(
    text: str, reward: float, metrics: tuple[float, ...]
) -> None:
    env = CountdownEnv(Observation((1,)), (2, 3, 4), 10, CountdownReward())
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    names = ("correct", "format", "well_formed", "correct_well_formed")
    assert result.metrics == dict(zip(names, metrics, strict=True))


def test_bundled_tokenizer_is_the_one_that_warm_start_makes() -> None:
    directory = Path(countdown.__file__).parent / "model"
    bundled = AutoTokenizer.from_pretrained(directory)
    text = "27,19,4=50\n<think>27+19=46</think><answer>(27-4)*2/1</answer>"
    assert bundled.decode(bundled.encode(text)) == text
    assert bundled.encode(text) == build_tokenizer(CHARACTERS).encode(text)
    ended = bundled.encode("1<eos>")
    assert ended[-1] == bundled.eos_token_id
    assert bundled.decode(ended, skip_special_tokens=True) == "1"


def _examples(count: int) -> list[tuple[warm_start.Problem, warm_start.Solution]]:
    problems = islice(generate_problems(0, "train"), count)
    return [(p, s) for p in problems if (s := solve(p.numbers, p.target)) is not None]


def test_clean_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = small_model.build_tokenizer(warm_start.CHARACTERS)
    for problem, solution in _examples(300):
        text = solution.demonstration
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
        )
        for problem, solution in _examples(800)
    ]
    correct = sum(grade.metrics["correct"] for grade in grades) / len(grades)
    badly_formed = sum(not grade.metrics["well_formed"] for grade in grades) / len(grades)
    only_wrong = sum(
        grade.metrics["well_formed"] and not grade.metrics["correct"] for grade in grades
    ) / len(grades)
    assert 0.25 < correct < 0.45
    assert badly_formed > 0.4
    assert only_wrong > 0.05


def test_bundled_model_can_and_often_does_not() -> None:
    """The point of the warm start; the README's numbers come from the command it names."""
    tokenizer = small_model.build_tokenizer(warm_start.CHARACTERS)
    model = AutoModelForCausalLM.from_pretrained(CLIConfig().model_name)
    found = measured(CLIConfig(), model, tokenizer, samples=8, num_test=60)
    assert 0.2 < found["correct"] < 0.6
    assert found["pass_at_8"] > found["correct"]
    assert found["format"] < 1.0
