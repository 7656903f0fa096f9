"""Rows as of GSM8K, MATH and DeepScaleR are recognised, graded by their own answers, or refused."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.math.dataset import MathDatasetBuilder, MathEnv, PromptStyle, reward_of
from es_cookbook.recipes.math.warm_start import CHARACTERS
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Observation

pytestmark = pytest.mark.anyio

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


def _write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def _build(**fields: Any) -> tuple[ProblemDataset, Sequence[ProblemGroupBuilder]]:
    settings = {"problems_per_generation": 1, **fields}
    datasets = await MathDatasetBuilder(**settings)(build_tokenizer(CHARACTERS))
    assert isinstance(datasets.train, ProblemDataset)
    return datasets.train, cast(Sequence[ProblemGroupBuilder], datasets.test_P)


@pytest.mark.parametrize("prompt", ["plain", "boxed", "tags"])
async def test_generated_problems_can_earn_the_full_reward(prompt: PromptStyle) -> None:
    train, test = await _build(num_train=30, num_test=20, prompt=prompt)
    await train.validate(512)
    assert len(test) == 20
    again, same = await _build(num_train=30, num_test=20, prompt=prompt, seed=1)
    assert [builder.name for builder in test] == [builder.name for builder in same]
    assert [b.name for b in train.builders] != [b.name for b in again.builders]


async def test_the_three_formats_in_one_file_are_graded_by_their_own_answers(
    tmp_path: Path,
) -> None:
    """In worker processes where math-verify is installed; else as numbers, which GSM8K's are."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    source = _write(tmp_path / "rows.jsonl", [*GSM8K, *MATH, *DEEPSCALER])
    train, _ = await _build(source=source, num_test=0)
    await train.validate(512)
    builders = train.builders
    golds = {builder.gold for builder in builders}
    assert {r"\boxed{1296}", r"\boxed{\frac{1}{4}}", r"\boxed{\sqrt{2}}", r"\boxed{2}"} <= golds
    assert {tag for builder in builders for tag in builder.tags} == {
        *("level 1", "prealgebra", "level 2", "algebra")
    }


async def test_numbers_need_no_math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("es_cookbook.rl.rewards.math_answers.find_spec", lambda _: None)
    source = _write(tmp_path / "gsm8k.jsonl", GSM8K)
    train, test = await _build(source=source, fold=3)
    await train.validate(512)
    assert len(train.builders) + len(test) == len(GSM8K)
    with pytest.raises(ConfigError, match="math-verify, which is not installed"):
        await _build(source=source, grading="math", num_test=0)
    with pytest.raises(ConfigError, match="math-verify, which is not installed"):
        MathDatasetBuilder(grading="math").check()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "?", "target": 3}, "found: prompt, target"),
        ({}, "found: nothing"),
        ({"question": "?", "answer": "42"}, "field 'answer' must end in '#### ' and the answer"),
        ({"question": "?", "answer": "so\n#### "}, "the answer is empty"),
        ({"question": "", "answer": "#### 1"}, "field 'question' must be text, and some"),
        ({"question": "?", "answer": "#### many"}, "field 'answer' must hold a number"),
        ({"problem": "?", "solution": "It is 3."}, r"must have the answer in \boxed{}"),
        ({"problem": "?", "solution": r"\boxed{3"}, r"must have the answer in \boxed{}"),
        ({"problem": "?", "answer": ["1", "2"]}, "field 'answer' must be one answer"),
        ({"problem": "?", "answer": {"a": 1}}, "field 'answer' must be one answer"),
        ({"problem": "?", "answer": " "}, "the answer is empty"),
    ],
)
async def test_a_row_that_cannot_be_used_is_named(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    source = _write(tmp_path / "train.jsonl", [GSM8K[0], row])
    with pytest.raises(DataError) as caught:
        await _build(source=source, num_test=0)
    assert str(caught.value).startswith(f"{source}, line 2: ")
    assert sentence in str(caught.value)


async def test_an_answer_that_cannot_stand_in_a_box_is_refused_before_training(
    tmp_path: Path,
) -> None:
    row = {"problem": "?", "answer": "}3{"}
    train, _ = await _build(
        source=_write(tmp_path / "train.jsonl", [row]), num_test=0, grading="number"
    )
    with pytest.raises(DataError, match=r"line 1: its own solution earns .* of 1: '\\\\boxed"):
        await train.validate(512)


async def test_empty_files_and_problems_in_both_splits_are_refused(tmp_path: Path) -> None:
    source = _write(tmp_path / "train.jsonl", GSM8K[:2])
    with pytest.raises(DataError, match="there are no training problems"):
        await _build(source=_write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match=r"test.jsonl, line 1; training and test must be disjoint"):
        await _build(source=source, test_source=_write(tmp_path / "test.jsonl", GSM8K[1:3]))
    train, _ = await _build(source=source, num_test=0)
    with pytest.raises(DataError, match="leaves no room in the engine's context of 4 tokens"):
        await train.validate(4)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_train": 0}, "num_train"),
        ({"fold": 10}, "fold must be in [0, 9], found 10"),
        ({"format_weight": 2}, "format_weight must be in [0, 1], found 2"),
        ({"test_source": "a.jsonl"}, "test_source needs source=... beside it"),
    ],
)
def test_fields_that_cannot_work_are_named(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MathDatasetBuilder(**fields)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "style", "reward", "metrics"),
    [
        (r"6*7=42, so \boxed{42}", "boxed", 1.0, (1, 1, 1)),
        (r"\boxed{1} or \boxed{42}", "boxed", 0.9, (1, 0, 1)),
        (r"\boxed{41}", "plain", 0.1, (0, 1, 1)),
        (r"\boxed{}", "plain", 0.0, (0, 0, 0)),
        (r"\boxed{42", "plain", 0.0, (0, 0, 0)),
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


async def test_a_chat_that_opens_the_thought_changes_what_is_expected() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    builder = MathDatasetBuilder(prompt="tags", num_train=3, num_test=0, problems_per_generation=1)
    train = (await builder(tokenizer)).train
    await train.validate(512)
    assert train.get_batch(0)[0].gold.startswith("</think>")
