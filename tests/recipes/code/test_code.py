"""The recipe code: rows of MBPP and APPS, answers in texts, grades from the sandbox, and a run."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from es_cookbook.common.errors import ConfigError, DataError, SandboxError
from es_cookbook.recipes.code import dataset as code_dataset
from es_cookbook.recipes.code.dataset import (
    CodeDatasetBuilder,
    extract_code,
    grade_code,
    read_problem,
)
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.grading.sandbox import Limits, check_sandbox
from es_cookbook.rl.types import Action, EnvGroupBuilder
from tests.recipe_problems import write_rows
from tests.sandboxes import needs_sandbox
from tools.bundled.countdown import CHARACTERS
from tools.small_model import build_tokenizer

MBPP: dict[str, Any] = {
    "text": "Write a function to double a number.",
    "code": "import math\r\ndef double(x):\r\n  return 2 * x",
    "test_list": ["assert double(2) == 4", "assert math.isclose(double(.5), 1)"],
    "test_setup_code": "",
}
APPS: dict[str, Any] = {
    "question": "Print the sum of the numbers in a line.",
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4 5\n"], "outputs": ["3\n", "12"]}),
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
}


async def build(**fields: Any) -> tuple[ProblemDataset, Sequence[EnvGroupBuilder]]:
    defaults: dict[str, Any] = {"problems_per_generation": 1, "num_train": 4, "num_test": 2}
    built = await CodeDatasetBuilder(**{**defaults, **fields})(build_tokenizer(CHARACTERS))
    assert isinstance(built.train, ProblemDataset)
    return built.train, built.test_P


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text": "x"}, "a problem needs tests: 'test_list', a list of asserts (MBPP), or"),
        ({"test_list": ["assert 1"]}, "field 'text' or 'prompt' is missing"),
        ({"question": "x", "input_output": "{"}, "field 'input_output' is not JSON"),
        ({**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "as many texts in each"),
        ({**APPS, "input_output": '{"fn_name": "f"}'}, "accepted as asserts in 'test_list'"),
        ({**APPS, "solutions": "3"}, "field 'solutions' must be a JSON list of programs"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        read_problem(Row("train.jsonl, line 3", fields), 8)
    assert str(caught.value).startswith("train.jsonl, line 3: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\na\n```\n```py\nb\n``` and ```c", "b\n"),
        ("```x = 1\ny = 2```", "x = 1\ny = 2"),
        ("<answer>```python\nz\n```</answer> ```y```", "z\n"),
        ("<think>```1```</think><answer>2</answer>", "2"),
        ("no code ```", None),
    ],
)
def test_the_answer_is_the_last_block_or_answer(text: str, code: str | None) -> None:
    assert extract_code(text) == code


@needs_sandbox
@pytest.mark.parametrize(
    ("fields", "code", "passed"),
    [
        (MBPP, "def double(x): return x + x", 1.0),
        (MBPP, "def double(x): return 4", 0.5),
        (MBPP, "class double:\n  def __new__(c, x): return 1\n  __eq__ = lambda *a: True", 0.5),
        (MBPP, "raise SystemExit(0)", 0.0),
        (APPS, "print(sum(map(int, input().split())), end=' ')", 1.0),
        (APPS, "print(3)", 0.5),
        (APPS, "print(3); raise ValueError", 0.0),
        (APPS, "print('3\\n12')", 0.0),
        (APPS, None, 0.0),
    ],
)
async def test_what_answers_earn(fields: dict[str, Any], code: str | None, passed: float) -> None:
    problem = read_problem(Row("x", fields), 8)
    share = await grade_code(problem, code, "share")
    every = await grade_code(problem, code, "all")
    assert (share.reward, every.reward) == (passed, float(passed == 1))
    assert share.metrics == {
        "solved": float(passed == 1),
        "passed": passed,
        "answered": float(code is not None),
        "timed_out": 0.0,
    }


@needs_sandbox
async def test_a_case_that_never_ends_costs_one_deadline() -> None:
    problem = read_problem(Row("x", APPS), 8)
    grade = await grade_code(problem, "while True: pass", limits=Limits(seconds=0.3))
    assert (grade.reward, grade.metrics["timed_out"]) == (0.0, 1.0)


@needs_sandbox
async def test_equal_answers_of_a_group_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = code_dataset.run_code

    async def counted(code: str, stdin: str = "", limits: Limits | None = None) -> Any:
        ran.append(code)
        return await real(code, stdin, limits)

    monkeypatch.setattr(code_dataset, "run_code", counted)
    problem = read_problem(Row("x", APPS), 1)
    builder = CodeDatasetBuilder().builder("x", problem, build_tokenizer(CHARACTERS))
    group = await pickle.loads(pickle.dumps(builder)).make_envs(3)
    for env, text in zip(
        group.envs, ("```print(3)```", "<answer>print(3)</answer>", "?"), strict=True
    ):
        result = await env.step(Action((1,), text, "stop"))
        assert result.done and result.reward == float(text != "?")
    assert ran == ["print(3)"]


@needs_sandbox
async def test_every_gold_solution_runs_and_one_that_fails_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list([{**MBPP, "prompt": MBPP["text"]}]).to_parquet(path)
    train, _ = await build(source=str(path), num_test=0)
    await train.validate(4096)
    bad = {**MBPP, "code": "def double(x):\n  return 4"}
    source = write_rows(tmp_path / "bad.jsonl", [APPS, bad])
    train, _ = await build(source=source, num_test=0)
    with pytest.raises(DataError) as caught:
        await train.validate(4096)
    assert str(caught.value).startswith(f"{source}, line 2: its own solution earns 0.5 of 1: ")
    assert "(in the sandbox: 2: AssertionError" in str(caught.value)
    with pytest.raises(DataError, match="leaves no room"):
        await train.validate(5)


def test_without_a_sandbox_the_run_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_sandbox.cache_clear()
    with pytest.raises(SandboxError, match="install the packages bubblewrap"):
        CodeDatasetBuilder().check()
    with pytest.raises(ConfigError, match="max_cases must be at least 1"):
        CodeDatasetBuilder(max_cases=0)
