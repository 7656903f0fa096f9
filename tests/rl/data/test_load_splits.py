"""Rows of files as training and held-out problems."""

import dataclasses
import json
from pathlib import Path

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.row_dataset import load_splits
from es_cookbook.rl.data.rows import Row


@dataclasses.dataclass(frozen=True)
class Number:
    key: int


def is_held_out(number: Number) -> bool:
    return number.key % 4 == 0


def read(row: Row) -> Number:
    return Number(row.integer("number"))


def write(path: Path, numbers: list[object]) -> str:
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in numbers))
    return str(path)


def keys(problems: dict[str, Number]) -> list[int]:
    return [problem.key for problem in problems.values()]


def test_one_source_is_split_by_the_problems_and_read_until_both_have_enough(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "all.jsonl", [*range(1, 9), "never read"])
    train, test = load_splits(source, None, read, is_held_out, num_train=4, num_test=1)
    assert (keys(train), keys(test)) == ([1, 2, 3, 5], [4])
    assert list(test) == [f"{source}, line 4"]
    with pytest.raises(DataError, match="line 9: field 'number' must be a whole number"):
        load_splits(source, None, read, is_held_out, num_train=9, num_test=9)


def test_without_held_out_problems_all_are_for_training(tmp_path: Path) -> None:
    source = write(tmp_path / "all.jsonl", [*range(1, 9)])
    train, test = load_splits(source, None, read, is_held_out, num_train=99, num_test=0)
    assert (keys(train), keys(test)) == ([*range(1, 9)], [])


def test_two_sources_are_used_whole_and_must_be_disjoint(tmp_path: Path) -> None:
    source = write(tmp_path / "train.jsonl", [4, 8, 5])
    test_source = write(tmp_path / "test.jsonl", [6, 5])
    train, test = load_splits(source, test_source, read, is_held_out, num_train=9, num_test=1)
    assert (keys(train), keys(test)) == ([4, 8, 5], [6])
    with pytest.raises(DataError) as caught:
        load_splits(source, test_source, read, is_held_out, num_train=9, num_test=9)
    assert str(caught.value) == (
        f"{source}, line 3: this problem is also held out, in {test_source}, line 2; training and "
        "test must be disjoint"
    )
