"""Data sets of generated problems or of rows: folds, streams, and what all of them refuse."""

import functools
import random
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.generated import SourcedDatasetBuilder, distinct
from tests.recipe_problems import write_rows

SAME = {
    "code": ({"text": "double", "test_list": ["assert double(2) == 4"]},) * 2,
    "countdown": (
        {"numbers": [3, 4, 2], "target": 14},
        {"numbers": [2, 4, 3], "target": 14},  # whatever their order
    ),
    "markovian": ({"question": "1+1", "answer": "2"},) * 2,
    "math": ({"question": "1+1?", "answer": "#### 2"},) * 2,
    "rush_hour": (
        {"board": "ooBo AABo oooo oooo"},
        {"board": "oooo oooo AAZo ooZo"},  # upside down and renamed
    ),
}
"""Recipe -> two rows that are the same problem."""


def test_a_stream_is_distinct_of_its_fold_and_ends() -> None:
    rng = random.Random(0)

    def is_odd(number: int) -> bool:
        return number % 2 == 1

    assert sorted(distinct(lambda: rng.randrange(10), is_odd)) == [1, 3, 5, 7, 9]
    endless = distinct(lambda: rng.randrange(10**9), is_odd)
    assert all(number % 2 for number in islice(endless, 20))


@pytest.mark.parametrize("name", SAME)
async def test_a_file_without_problems_and_a_problem_in_both_are_refused(
    name: str, tmp_path: Path
) -> None:
    recipe = recipe_defaults(name)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model_name)
    files = [write_rows(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(SAME[name])]
    build = functools.partial(type(recipe.dataset), source=files[0], problems_per_generation=1)
    assert isinstance(build(), SourcedDatasetBuilder)
    with pytest.raises(DataError, match=r"0.jsonl, line 1: this problem is also held out, in .*1"):
        await build(test_source=files[1])(tokenizer)
    with pytest.raises(DataError, match=r"empty.jsonl: there are no training problems"):
        await build(source=write_rows(tmp_path / "empty.jsonl", []))(tokenizer)
    with pytest.raises(DataError, match=r"empty.jsonl: there are no rows to test on"):
        SourcedDatasetBuilder.check(build(test_source=str(tmp_path / "empty.jsonl")))


@pytest.mark.parametrize("bad", [{"numbers": [3, 4, 2]}, {"numbers": [1, 1], "target": 99}])
async def test_bad_rows_of_a_file_are_refused_or_skipped_and_told(
    bad: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("es_cookbook.rl.data.rows.say", said.append)
    recipe = recipe_defaults("countdown")
    tokenizer = AutoTokenizer.from_pretrained(recipe.model_name)
    good = [{"numbers": [3, 4, 2 + i], "target": 7 + 2 + i} for i in range(30)]
    path = write_rows(tmp_path / "rows.jsonl", [*good[:7], bad, *good[7:]])
    build = functools.partial(type(recipe.dataset), source=path, problems_per_generation=1)
    with pytest.raises(DataError, match=r"rows.jsonl, line 8: "):
        await build()(tokenizer)
    whole = await build(source=write_rows(tmp_path / "good.jsonl", good))(tokenizer)
    assert not said
    datasets = await build(on_bad_row="skip")(tokenizer)
    assert len(datasets.train) == len(whole.train) and len(datasets.test_P) == len(whole.test_P)
    (sentence,) = said
    assert sentence.startswith(f"{path}: of 31 rows, 1 unusable and skipped (line 8: ")
    with pytest.raises(DataError, match="none is left"):
        await build(source=write_rows(tmp_path / "b.jsonl", [bad]), on_bad_row="skip")(tokenizer)
