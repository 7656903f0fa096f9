"""A row is held out by what it is, whatever the prompt, seed and number."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.population.results import problem_names
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.types import Datasets
from tests.recipe_problems import write_rows
from tests.tiny_models import character_tokenizer

TOKENIZER = character_tokenizer()


def score(text: str, row: Mapping[str, Any]) -> float:
    return float(text == row["answer"])


@pytest.fixture
def sixty(tmp_path: Path) -> str:
    """A file of sixty rows, two for each question."""
    rows = [{"question": f"{i // 2}:1=", "answer": str(i), "part": f"p{i % 3}"} for i in range(60)]
    return write_rows(tmp_path / "rows.jsonl", rows)


def task(source: str, **fields: Any) -> Task:
    given = {
        "prompt": "{answer}:{question}",
        "problems_per_generation": 1,
        "full_reward": None,
    } | fields
    return Task(source=source, reward=score, **given)


def lines(datasets: Datasets) -> tuple[list[int], list[int]]:
    """On which lines of the file the training and the held-out rows stand."""
    assert isinstance(datasets.train, ProblemDataset)
    train, test = map(problem_names, (datasets.train.builders, datasets.test_P))
    return [int(name.rpartition(" ")[2]) for name in train], [
        int(name.rpartition(" ")[2]) for name in test
    ]


async def test_another_prompt_or_seed_holds_out_the_same_rows_and_exactly_as_many_as_asked(
    sixty: str,
) -> None:
    asked = [
        {"prompt": "{answer}:{question}"},
        {"prompt": "0{question}{answer}", "seed": 3},
        {"prompt": "{answer}", "system": "1", "problems_per_generation": 4},
    ]
    found = [lines(await task(sixty, num_test=12, **fields)(TOKENIZER)) for fields in asked]
    assert [test for _, test in found] == [found[0][1]] * 3
    assert all((len(train), len(test)) == (48, 12) for train, test in found)
    assert not {*found[0][0]} & {*found[0][1]}


async def test_fewer_held_out_rows_are_the_first_of_more_whatever_their_number(sixty: str) -> None:
    found = {n: lines(await task(sixty, num_test=n)(TOKENIZER)) for n in (0, 1, 2, 8, 12, 40, 59)}
    for number, (train, test) in found.items():
        assert test == found[59][1][:number] and not {*train} & {*test}
    default = lines(await task(sixty)(TOKENIZER))
    assert default[1] == found[len(default[1])][1] and 1 <= len(default[1]) <= 12
    # A smaller number leaves the rest of the share unused, so that no row changes sides.
    assert found[1][0] == default[0]
    assert (await task(sixty, num_test=0)(TOKENIZER)).test_P == []
    assert len(found[0][0]) == 60


@pytest.mark.parametrize("split_by", ["question", "{question}", "question, part"])
async def test_rows_that_share_the_fields_of_the_users_choice_are_in_one_split(
    sixty: str, split_by: str
) -> None:
    rows = [json.loads(line) for line in Path(sixty).read_text().splitlines()]
    for number in range(1, 30):
        train, test = lines(await task(sixty, num_test=number, split_by=split_by)(TOKENIZER))
        keys = [
            {tuple(rows[line - 1][name] for name in ("question", "part")) for line in of_split}
            for of_split in (train, test)
        ]
        if "part" not in split_by:
            keys = [{question for question, _ in of_split} for of_split in keys]
        assert len(test) == number and not keys[0] & keys[1]


async def test_a_training_row_that_asks_what_a_held_out_one_asks_is_left_out(
    sixty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("es_cookbook.rl.data.row_dataset.say", said.append)
    train, test = lines(await task(sixty, prompt="{question}", num_test=12)(TOKENIZER))
    assert len(test) == 12 and len(train) < 48
    assert not {(line - 1) // 2 for line in train} & {(line - 1) // 2 for line in test}
    assert said == [
        f"{sixty}: {48 - len(train)} of 48 training rows have the prompt of a held-out row, "
        "token by token, and are left out; dataset.split_by=FIELD holds rows out together that "
        "have the same FIELD"
    ]
    with pytest.raises(
        DataError, match=r"48 of 48 training rows have the prompt .*; dataset\.split"
    ):
        await task(sixty, prompt="1", num_test=12)(TOKENIZER)
