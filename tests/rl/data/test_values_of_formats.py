"""The same values in files of every format give the same prompts, gold answers and tags."""

import csv
import datetime
import gzip
import io
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.plugins.judges.reward import filled_message
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.data.rows import Row, filled, with_choices
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.base import Reward
from es_cookbook.rl.rewards.matching import Exact, Number
from es_cookbook.rl.rewards.values import printed
from tests.tiny_models import character_tokenizer

TEXTS = [
    *("0042", "3.10", "23:59", "98765432109876543210", "0xFF", "2E7", "N/A", "NaN", "False", "-0"),
    *(".25", "  x ", "", "2023-12-31", "2023-12-31T08:00:00", "null", 'a "b", c', "zwei\nZeilen"),
]
OTHERS: dict[object, str] = {
    **{6: "6", -12: "-12", 2**62 + 1: "4611686018427387905", 0.1: "0.1", 1e16: "1" + 16 * "0"},
    **{-2.5: "-2.5", True: "true", datetime.date(2023, 2, 1): "2023-02-01"},
    **{datetime.datetime(2023, 2, 1, 9, 30): "2023-02-01T09:30:00"},
    **{Decimal("7.50"): "7.50", datetime.time(7, 5): "07:05:00"},
}
STRUCTURE = {"größe": [1, None], "wahr": True}
VALUES: list[Any] = [*TEXTS, *OTHERS, STRUCTURE]
SHOWN = [*TEXTS, *OTHERS.values(), '{"größe": [1, null], "wahr": true}']
NAMES = [f"v{i}" for i in range(len(VALUES))]
KINDS = (
    *("a.csv", "a.csv.gz", "a.jsonl", "a.json", "a.parquet", "file.arrow"),
    *("csv/train.csv", "jsonl/train.jsonl", "json/train.json", "parquet/train.parquet"),
)


def written(path: Path) -> str:
    """The values as a row of a file; the source that reads it."""
    path.parent.mkdir(exist_ok=True)
    if ".csv" in path.name:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([NAMES, SHOWN])
        data = text.getvalue().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    elif ".json" in path.name:
        row = dict(zip(NAMES, VALUES, strict=True))
        line = json.dumps(row, default=printed)  # JSON has no dates.
        path.write_text(f"{line}\n" if path.suffix == ".jsonl" else f"[{line}]")
    else:
        table = pyarrow.table({n: [v] for n, v in zip(NAMES, VALUES, strict=True)})
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as sink:
                sink.write_table(table)
    return str(path if path.parent.name not in {"csv", "jsonl", "json", "parquet"} else path.parent)


def own(text: str, row: Mapping[str, Any]) -> float:
    return float(bool(text) and bool(row))


@pytest.mark.parametrize("kind", KINDS)
async def test_prompts_golds_and_tags_are_those_of_the_source(tmp_path: Path, kind: str) -> None:
    source = written(tmp_path / kind)
    (row,) = load_rows(source)
    for name, expected in zip(NAMES, SHOWN, strict=True):
        field = f"{{{name}}}"
        task = Task(source=source, prompt=f"?{field}", gold=field, tag=name, reward=own)
        problem = task.problem(row, character_tokenizer())
        assert filled(task.prompt, row) == f"?{expected}"
        assert (problem.gold, problem.problem_tags) == (expected, (expected,))
        assert filled_message(field, {}, row.fields) == expected
        if isinstance(row.fields[name], bool | dict) or expected == "":
            continue
        assert Exact(field=name)(expected, row.fields) == 1


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
async def test_own_rewards_get_the_numbers_that_prompts_show(tmp_path: Path, name: str) -> None:
    frame = pandas.DataFrame({"n": [19.0, None, 2.5], "of": [{"deep": [7.0]}] * 3})
    path = tmp_path / name
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=path.suffix == ".jsonl")

    def same(text: str, row: Mapping[str, Any]) -> float:
        return float(text == f"{row['n']} {row['of']['deep'][0]}")

    given: dict[str, Any] = {"on_bad_row": "skip", "num_test": 0, "full_reward": None}
    given["problems_per_generation"] = 1
    datasets = await Task(source=str(path), prompt="{n}", reward=same, **given)(
        character_tokenizer()
    )
    assert isinstance(datasets.train, ProblemDataset)
    first_env, last_env = (builder.make_env() for builder in datasets.train.builders)
    assert (await first_env.graded("19 7")).reward == (await last_env.graded("2.5 7")).reward == 1
    first, _, _ = load_rows(str(path))
    assert first.integer("n") == 19


@pytest.mark.parametrize("reward", [Exact(), Number()])
def test_texts_without_the_mark_of_utf_8_are_texts(tmp_path: Path, reward: Reward) -> None:
    columns = {
        "question": pyarrow.array(["drei plus zwei, größer?".encode()], pyarrow.binary()),
        "answer": pyarrow.array([b"5"], pyarrow.large_binary()),
        "choices": pyarrow.array([[b"4", b"5"]], pyarrow.list_(pyarrow.binary())),
        "chat": pyarrow.array([[{"role": b"user", "content": b"hi"}]]),
        "image": pyarrow.array([b"\x89PNG\xff"], pyarrow.binary()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (row,) = load_rows(str(tmp_path / "a.parquet"))
    assert filled("{question} {choices}", with_choices(row)) == (
        "drei plus zwei, größer? A. 4\nB. 5"
    )
    assert row.fields["chat"] == [{"role": "user", "content": "hi"}]
    assert reward("5", row.fields) == 1
    with pytest.raises(DataError) as caught:
        filled("{image}", row)
    assert str(caught.value) == (
        f"{tmp_path}/a.parquet, row 1: field 'image' must be text, found bytes that are not UTF-8"
    )


def test_structures_are_json_and_bytes_in_them_are_refused() -> None:
    value = {"price": Decimal("1.20"), "on": [datetime.date(2020, 1, 2), 3.0, "é\n"], "of": None}
    assert json.loads(printed(value)) == {"price": 1.2, "on": ["2020-01-02", 3, "é\n"], "of": None}
    assert printed(value).startswith('{"price": 1.20, "on": ["2020-01-02", 3, "é')
    with pytest.raises(DataError, match=r"row 4: field 'a' must be text, found bytes"):
        filled("{a}", Row("row 4", {"a": [{"b": b"\xff"}]}))
    with pytest.raises(DataError, match=r"row 4: field 'a' is nested too deeply to be shown"):
        filled("{a}", Row("row 4", {"a": json.loads("[" * 900 + "]" * 900)}))
