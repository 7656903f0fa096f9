"""Data as people have it: every kind of file, directory and set, and parts of them."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.sources import label_of, load_rows
from tests.hub_server import HubServer, Repository

ROWS: list[dict[str, Any]] = [
    {"question": "1 + 1, and?", "answer": 2},
    {"question": 'He said:\n"3 + 4"', "answer": 7},
    {"question": "über 5 + 5 — 三", "answer": 10},
]
AS_CSV = [row | {"answer": str(row["answer"])} for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*.parquet}
  - {split: test, path: main/test-*.parquet}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/*.parquet}
---
# Questions
"""


def written(path: Path) -> Path:
    """The rows, in the form that a file's name says."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    table = datasets.Dataset.from_list(ROWS)
    if kind == "jsonl":
        data = LINES
    elif kind == "json":
        data = json.dumps(ROWS, indent=1).encode()
    elif kind == "csv":
        data = table.to_pandas().to_csv(index=False).encode()  # pyright: ignore[reportUnknownMemberType]
    elif kind == "parquet":
        table.to_parquet(path)
        return path
    else:
        opened = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
        with opened(str(path), table.data.table.schema) as sink:
            sink.write_table(table.data.table)
        return path
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def fields(source: object, **more: Any) -> list[Mapping[str, object]]:
    return [row.fields for row in load_rows(str(source), **more)]


def in_hub_layout(path: Path) -> Path:
    splits = {"main/train-0": ROWS, "main/test-0": ROWS[:1], "socratic/train": ROWS}
    for name, rows in splits.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(path / f"{name}.parquet")
    (path / "README.md").write_text(CARD)
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.csv", "a.csv.gz"),
        *("a.parquet", "stream.arrow", "file.arrow"),
    ],
)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name)
    rows = list(load_rows(str(path)))
    expected = AS_CSV if ".csv" in name else ROWS
    assert [dict(row.fields) for row in rows] == expected
    assert rows[1].where == f"{path}, {'line' if 'jsonl' in name else 'row'} 2"
    assert label_of(f"{path}[1:]") == name.partition(".")[0]


def test_several_files_patterns_and_parts(tmp_path: Path) -> None:
    names = ("b.jsonl", "a.parquet", "c.csv")
    a, b, c = sorted(written(tmp_path / name) for name in names)
    assert fields(f"{b}, {a}[1:2],{c}[:1]") == [*ROWS, ROWS[1], AS_CSV[0]]
    assert [row.where for row in load_rows(f"{tmp_path}/[ab].*[2:4]")] == [
        f"{a}, row 3",
        f"{b}, line 1",
    ]
    assert fields(f"{a}[7:]") == []
    whole = tmp_path / "x, y.jsonl"
    whole.write_bytes(LINES)
    assert fields(whole) == ROWS


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.json", b"[1]", "row 1: must be a JSON object, found 1"),
        ("a.json", b"[" * 10_000, "could not be read as a dataset"),
        ("a.jsonl.gz", gzip.compress(LINES * 999)[:-20], "could not be read as a dataset"),
        ("a.arrow", b"", "could not be read as a dataset"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", b"[1, 2]", "line 1: must be a JSON object, found [1, 2]"),
        ("a.csv", b"a,b\n1,2\n3,4,5\n", "a.csv, row 2: has 3 cells, and the header 2"),
        ("a.csv", b"", "a.csv: has no header"),
        ("a.csv", b"a,a\n1,2\n", "a.csv: has columns of the same name: a, a"),
        ("a.csv", b"a,b\ncaf\xe9,2\n", "could not be read as a dataset ('utf-8' codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        fields(path)
    assert str(caught.value).startswith(str(path)) and said in str(caught.value)


def test_directories_of_save_to_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one", num_shards=2)
    assert fields(tmp_path / "one") == ROWS
    splits = datasets.DatasetDict({"train": table, "test": table.select([1])})
    splits.save_to_disk(tmp_path / "two")
    assert fields(tmp_path / "two") == ROWS
    assert fields(tmp_path / "two", split="test") == fields(f"{tmp_path}/two:test") == [ROWS[1]]
    assert fields(f"{tmp_path}/two:train[2:]") == [ROWS[2]]
    with pytest.raises(DataError, match=r"two: has no split 'dev', only test, train; accepted"):
        load_rows(f"{tmp_path}/two:dev")


def test_a_directory_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    path = in_hub_layout(tmp_path / "gsm8k")
    assert fields(f"{path}:main") == fields(f"{path}:main:train") == ROWS
    assert fields(f"{path}:main", split="test") == fields(f"{path}:main:test") == ROWS[:1]
    assert fields(f"{path}:socratic[:2]") == ROWS[:2]
    assert label_of(f"{path}:main:train[:2]") == "gsm8k"
    for source, said in (
        (path, "has several configurations, choose one of main, socratic; accepted is "),
        (f"{path}:mein", "has no configuration 'mein', only main, socratic; "),
        (f"{path}:main:validation", "has no split 'validation', only train, test; "),
        (f"{path}:socratic:test", "has no split 'test', only train; "),
    ):
        with pytest.raises(DataError) as caught:
            load_rows(str(source))
        assert said in str(caught.value)
    (tmp_path / "secret.jsonl").write_bytes(LINES)
    (path / "README.md").write_text(CARD.replace("socratic/*.parquet", "../secret.jsonl"))
    with pytest.raises(
        DataError, match=r"names the data file '\.\./secret\.jsonl'; accepted: paths in"
    ):
        fields(f"{path}:socratic")


def test_a_set_of_the_hub_by_configuration_split_and_revision(
    hub: HubServer, tmp_path: Path
) -> None:
    path = in_hub_layout(tmp_path / "local")
    files = {
        str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()
    }
    repository = hub.repositories["datasets/me/gsm8k"] = Repository(False, files)
    before = datasets.Dataset.from_list(ROWS[1:])
    before.to_parquet(tmp_path / "old.parquet")
    old = files | {"main/train-0.parquet": (tmp_path / "old.parquet").read_bytes()}
    repository.branches["main"] = [old, files]
    assert fields("me/gsm8k:main") == ROWS
    assert fields("me/gsm8k:main", split="test") == ROWS[:1]
    assert fields(f"me/gsm8k@{1:040x}:main:train") == ROWS[1:]
    with pytest.raises(DataError, match="has no such revision of dataset me/gsm8k"):
        load_rows("me/gsm8k@other:main")
    assert [row.where for row in load_rows("me/gsm8k:socratic:train[1:2]")] == [
        "me/gsm8k [train], row 2"
    ]
    with pytest.raises(DataError, match="has no split 'dev', only train, test"):
        load_rows("me/gsm8k:main:dev")
    hub.fail_with = 503
    assert fields(f"me/gsm8k@{1:040x}:main[1:]") == ROWS[2:], "from the cache"
    with pytest.raises(DataError, match=r"from the cache \(it has revision 0+1\)"):
        load_rows(f"me/gsm8k@{2:040x}:main")


def test_a_part_of_a_set_is_read_without_downloading_the_rest(
    hub: HubServer, tmp_path: Path
) -> None:
    shards = {f"train-{n:02}.jsonl": LINES * 400 for n in range(20)}
    hub.repositories["datasets/me/many"] = Repository(False, shards)
    assert fields("me/many[:2]") == ROWS[:2]
    assert sum("resolve" in each and "train-" in each for each in hub.requests) < 6
    assert not list((tmp_path / "datasets").rglob("*.arrow"))
    assert len(fields("me/many")) == 20 * 1200


def test_a_set_that_needs_code_is_refused(hub: HubServer, tmp_path: Path) -> None:
    code = b"raise SystemExit('run')"
    hub.repositories["datasets/me/coded"] = Repository(False, {"coded.py": code})
    (tmp_path / "coded").mkdir()
    (tmp_path / "coded" / "coded.py").write_bytes(code)
    for source in ("me/coded", str(tmp_path / "coded")):
        with pytest.raises(DataError, match="Dataset scripts are no longer supported"):
            load_rows(source)


def in_both(hub: HubServer, path: Path, files: dict[str, bytes]) -> Path:
    """Serve a set of these files as me/cells, and write it to a directory, which is returned."""
    hub.repositories["datasets/me/cells"] = Repository(False, files)
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def test_csv_of_a_set_is_text_too(hub: HubServer, tmp_path: Path) -> None:
    cells = ["007", "1.50", "NA", "", " 7", "true", "12345678901234567890", "10:30"]
    lines = "".join(f"q{i},{cell}\n" for i, cell in enumerate(cells))
    files = {f"{split}.csv": f"question,answer\n{lines}".encode() for split in ("train", "test")}
    path = in_both(hub, tmp_path / "set", files)
    expected = [{"question": f"q{i}", "answer": cell} for i, cell in enumerate(cells)]
    assert fields(path) == fields("me/cells[:20]") == fields("me/cells") == expected
    assert fields("me/cells", split="test") == expected
    hub.fail_with = 503
    assert fields("me/cells") == expected, "from the cache"
    (row,) = load_rows("me/cells[:1]")
    assert row.integer("answer") == 7


CELLS: dict[str, Any] = {
    **{"day": "2023-12-31", "code": "042", "large": 98765432109876543210, "half": 0.5},
    **{"other": {"a": 1}, "at": "2023-12-31T08:00:00Z", "whole": 7, "none": None},
}
OTHERS = CELLS | {"code": "43", "other": {"b": "two"}, "half": 1, "whole": None, "none": "x"}


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_json_of_a_set_keeps_its_values_too(hub: HubServer, tmp_path: Path, name: str) -> None:
    cells = [CELLS, OTHERS]
    lines = "".join(json.dumps(row) + "\n" for row in cells)
    data = (json.dumps(cells) if name == "train.json" else lines).encode()
    path = in_both(hub, tmp_path / "set", {name: data})
    assert fields(path) == fields("me/cells[:20]") == fields("me/cells") == cells
    assert [row.where for row in load_rows("me/cells[1:]")] == ["me/cells [train], row 2"]
    hub.fail_with = 503
    assert fields("me/cells") == cells, "from the cache"
