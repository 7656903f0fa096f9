"""Rows as of GSM8K, MATH and DeepScaleR are recognised, graded by their own answers, or refused."""

import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.math.dataset import MathDatasetBuilder, MathEnv, PromptStyle, reward_of
from es_cookbook.recipes.math.word_problems import WordProblem, generate_problems
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.types import Action, Observation
from tests.recipe_problems import Builders, build, write_rows
from tools.bundled.math import CHARACTERS
from tools.small_model import build_tokenizer

GSM8K = [
    {
        "question": f"A box has {n} pens. How many do {n} boxes have?",
        "answer": f"{n} * {n} = <<{n}*{n}={n * n}>>{n * n} pens.\n#### {n * n:,}",
    }
    for n in range(36, 42)
]
MATH = [
    {
        "problem": "What is half of one half?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": r"At first \boxed{\frac{1}{2}}, then $\boxed{\frac{1}{4}}$.",
    },
    {"problem": "Solve $x^2=1$.", "level": 2, "type": "Algebra", "solution": r"\boxed{\{-1, 1\}}"},
    {"problem": "Where is north?", "level": "", "type": "", "solution": r"\boxed{\text{up}}"},
]
DEEPSCALER = [
    {"problem": "The root of two?", "answer": r"\sqrt{2}", "solution": r"$x^2 = 2$, so \boxed{x}."},
    {"problem": "One and one?", "answer": 2, "solution": ""},
]


async def _build(**fields: Any) -> tuple[ProblemDataset, Builders]:
    """Whose gold answers earn the full reward."""
    settings = {"problems_per_generation": 1, **fields}
    return await build(MathDatasetBuilder(**settings), build_tokenizer(CHARACTERS))


async def test_three_formats_in_one_file_are_graded_by_their_own_answers(tmp_path: Path) -> None:
    """In worker processes where math-verify is installed; else as numbers, which GSM8K's are."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    source = write_rows(tmp_path / "rows.jsonl", [*GSM8K, *MATH, *DEEPSCALER])
    train, _ = await _build(source=source, num_test=0)
    builders = train.builders
    golds = {builder.gold for builder in builders}
    assert {r"\boxed{1296}", r"\boxed{\frac{1}{4}}", r"\boxed{\sqrt{2}}", r"\boxed{2}"} <= golds
    assert {tag for builder in builders for tag in builder.tags} == {
        *("level 1", "prealgebra", "level 2", "algebra")
    }


async def test_numbers_need_no_math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("es_cookbook.plugins.math.reward.find_spec", lambda _: None)
    source = write_rows(tmp_path / "gsm8k.jsonl", GSM8K)
    train, test = await _build(source=source, fold=3)
    assert len(train.builders) + len(test) == len(GSM8K)
    with pytest.raises(ConfigError, match="math-verify, which is not installed"):
        MathDatasetBuilder(grading="math").check()


@pytest.mark.parametrize(
    ("text", "style", "reward", "metrics"),
    [
        (r"6*7=42, so \boxed{42}", "boxed", 1.0, (1, 1, 1)),
        (r"\boxed{1} or \boxed{42}", "boxed", 0.9, (1, 0, 1)),
        (r"\boxed{41}", "plain", 0.1, (0, 1, 1)),
        (r"\boxed{}", "plain", 0.0, (0, 0, 0)),
        ("42", "boxed", 0.0, (0, 0, 0)),
        ("<think>7</think><answer>42</answer>", "tags", 1.0, (1, 1, 1)),
        ("<answer>42</answer>", "tags", 0.9, (1, 0, 1)),
        (r"<think>\boxed{42}", "tags", 0.025, (0, 0.25, 0)),
    ],
)
async def test_correct_form_and_answered_are_told_apart(
    text: str, style: PromptStyle, reward: float, metrics: tuple[float, float, float]
) -> None:
    given = "row 1", "42", reward_of(style, is_number=True), style, 0.1
    env = pickle.loads(pickle.dumps(MathEnv(Observation((1,)), *given)))
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    assert tuple(result.metrics[name] for name in ("correct", "format", "answered")) == metrics


def problems(most: int = 400, seed: int = 0) -> list[WordProblem]:
    return list(itertools.islice(generate_problems(seed, range(10)), most))


def test_a_row_is_worked_out_as_in_gsm8k() -> None:
    """Every equation holds, each goes on with the last one's result, and the last is the answer."""
    for problem in problems():
        *lines, end = problem.row["answer"].split("\n")
        assert end == f"#### {problem.result}"
        result = None
        for line in lines:
            found = re.fullmatch(r"(\d+) ([-+*]) (\d+) = <<(\1\2\3)=(\d+)>>\5", line)
            assert found is not None, line
            left, right = int(found[1]), int(found[3])
            assert (
                int(found[5]) == {"+": left + right, "-": left - right, "*": left * right}[found[2]]
            )
            assert result in (None, left)
            result = int(found[5])
        assert result == problem.result
        assert all(str(number) in problem.question for number in problem.numbers)


def test_folds_share_no_numbers_in_any_order() -> None:
    def numbers(seed: int, folds: list[int]) -> set[tuple[int, ...]]:
        stream = itertools.islice(generate_problems(seed, folds), 300)
        return {tuple(sorted(problem.numbers)) for problem in stream}

    assert numbers(0, [0]).isdisjoint(numbers(1, [1, 2, 3]))
    assert numbers(0, [0]) & numbers(1, [0])
