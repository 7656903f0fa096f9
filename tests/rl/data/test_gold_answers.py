"""Gold answers that the model cannot say are refused before a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.common.trust import resolve
from es_cookbook.rl.data.problem_dataset import validate
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.base import REWARD_NAMES
from es_cookbook.rl.rewards.format import Format
from es_cookbook.rl.types import Datasets, SamplingParams, Tokenizer
from tests.byte_tokenizers import byte_tokenizer
from tests.recipe_problems import write_rows

ANSWER, THINK = ("<answer>", "</answer>"), ("<think>", "</think>")
ROW = {"question": "Which?", "answer": "7"}


async def checked(
    rows: str, tokenizer: Tokenizer, stop: tuple[str, ...] | None = (), **fields: Any
) -> Datasets:
    settings = {"source": rows, "num_test": 0, "problems_per_generation": 1, "chat": False}
    datasets = await Task(**settings | fields)(tokenizer)
    await validate(datasets, tokenizer, 4096, SamplingParams(stop=stop))
    return datasets


async def test_tags_of_answers_are_seen_though_they_are_special_tokens(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    task = {"reward": Format(), "gold": "<think>so</think><answer>{answer}</answer>"}
    for tokenizer in (byte_tokenizer(), byte_tokenizer(THINK + ANSWER)):
        await checked(rows, tokenizer, **task)


def between_results(text: str, row: Mapping[str, object]) -> float:
    return float(f"<result>{row['answer']}</result>" in text)


def the_same(text: str, row: Mapping[str, object]) -> float:
    return float(text == row["answer"])


async def test_a_tag_that_a_function_needs_is_refused_where_it_is_special(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [ROW])
    task = {"reward": between_results, "gold": "So <result>{answer}</result>"}
    await checked(rows, byte_tokenizer(ordinary=("<result>",)), **task)
    with pytest.raises(DataError) as caught:
        await checked(rows, byte_tokenizer(("<result>", "<other>")), **task)
    assert str(caught.value) == (
        f"{rows}, line 1: the model cannot say its own solution 'So <result>7</result>': its "
        "tokenizer does not keep all characters, or leaves special tokens out of answers; what is "
        "left, 'So 7</result>', earns 0 of 1"
    )


async def test_letters_that_a_tokenizer_composes_are_refused_if_it_matters(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{**ROW, "answer": "cafe\u0301"}])
    await checked(rows, byte_tokenizer(), reward=the_same)
    await checked(rows, byte_tokenizer(composes=True), reward=resolve(REWARD_NAMES["exact"])())
    with pytest.raises(DataError, match="what is left, 'café'"):
        await checked(rows, byte_tokenizer(composes=True), reward=the_same)


async def test_a_stop_text_in_a_perfect_answer_is_refused_where_the_reward_is_lost(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{**ROW, "answer": "3.14"}])
    await checked(rows, byte_tokenizer(), stop=(), reward=the_same)
    await checked(rows, byte_tokenizer(), stop=("\n", "5"), reward=the_same)
    said = r"sampling.stop ends it before its end \(\[\] ends .*\); what is left, '3', earns 0 of 1"
    with pytest.raises(DataError, match=said):
        await checked(rows, byte_tokenizer(), stop=(".",), reward=the_same)
    await checked(rows, byte_tokenizer(), stop=(".",), reward=the_same, full_reward=None)
