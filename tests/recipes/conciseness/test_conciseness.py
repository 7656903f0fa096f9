"""The recipe conciseness: its questions, its command line, KL that is only reported, and a run."""

import functools
from pathlib import Path

import chz
import pytest

from es_cookbook.recipes.conciseness.train_cli import CLIConfig
from tests.recipe_problems import APART, check_second_row_is_named, short_run
from tools.bundled import conciseness as warm_start
from tools.small_model import build_tokenizer

pytestmark = pytest.mark.anyio


def test_a_run_of_two_generations_reports_length_and_kl(tmp_path: Path) -> None:
    options = *APART, "dataset.tag=kind", "kl.problems_per_generation=2"
    first, *_, last = short_run("conciseness", tmp_path / "run", *options)
    for name in ("correct", "concise", "length", "excess"):
        assert {f"env/all/{name}", f"test/env/all/{name}"} <= first.keys()
    assert any(key.startswith("test/env/after/") for key in first)
    assert first["env/kl/kl"] > 1e-3 > abs(first["test/env/kl/kl"]), "the centre is the base"
    assert last["test/env/kl/kl"] > 1e-4, "and has moved"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "a"}, "field 'question' is missing; the row has: answer"),
        ({"question": "a?", "answer": ""}, "field 'answer' must be a text, a number or a list"),
    ],
)
async def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    good = {"question": "b?", "answer": ["yes", "certainly"]}
    dataset = functools.partial(chz.replace, CLIConfig().dataset)
    given = dataset, build_tokenizer(warm_start.CHARACTERS), tmp_path / "qa.jsonl"
    await check_second_row_is_named(*given, [good, row], sentence)
