"""Rows from files: what is read, and what is said about rows that cannot be."""

import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.files import FILE_TYPES
from es_cookbook.rl.data.rows import Row, messages_of, tools_of
from es_cookbook.rl.data.sources import load_rows
from tests.hub_server import HubServer, Repository


def test_nothing_in_a_table_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that calls itself an image made requests, opened files, and ended in a traceback."""
    asked: list[str] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *found, **_: asked.append(str(found)))
    (tmp_path / "secret.png").write_text("secret")
    kinds = (datasets.Image(), datasets.Audio(), datasets.Video(), datasets.Pdf())
    paths = {"bytes": None, "path": str(tmp_path / "secret.png")}, {"path": "http://evil.example/x"}
    names = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    for number, kind in enumerate(kinds):
        stored = datasets.Features({"q": names, "many": datasets.List({"inner": names})})
        columns = {"q": list(paths), "many": [[{"inner": path}] for path in paths]}
        table = datasets.Dataset.from_dict(columns, stored)
        table.info.features = datasets.Features({"q": kind, "many": datasets.List({"inner": kind})})
        path = tmp_path / f"rows{number}.parquet"
        schema = table.data.table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": table.features.to_dict()}})}
        )
        pyarrow.parquet.write_table(schema, path)
        rows = list(load_rows(str(path)))
        assert rows[0].fields["q"] == paths[0]
        assert rows[1].fields["many"] == [{"inner": {"bytes": None, **paths[1]}}]
    assert asked == []


@pytest.mark.parametrize("value", ["5", 5.5, True, [5]])
def test_wrong_type_of_a_whole_number(value: object) -> None:
    with pytest.raises(DataError, match=r"^f, line 3: field 'target' must be a whole number"):
        Row("f, line 3", {"target": value}).integer("target")


def test_a_missing_field_names_the_nearest() -> None:
    row = Row("f, line 3", {"prompts": "Why?", "chosen": "yes"})
    sentence = r"^f, line 3: field 'prompt' is missing; did you mean 'prompts'\?; the row has: prom"
    with pytest.raises(DataError, match=sentence):
        row.text("prompt")


def test_a_hub_set_is_read_and_then_needs_no_hub(
    hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = list(load_rows("me/data"))
    assert rows == [Row("me/data [train], row 1", {"a": 7})]
    assert caplog.messages == []
    hub.fail_with = 503
    hub.requests.clear()
    assert list(load_rows("me/data", option="dataset.source")) == rows
    assert caplog.messages[-1] == (
        f"dataset.source: me/data is read from the cache: {hub.url} answered with status 503"
    )
    assert len(hub.requests) == 1


def test_a_hub_set_that_cannot_be_had_is_one_sentence(hub: HubServer) -> None:
    with pytest.raises(DataError) as caught:
        load_rows("me/none")
    assert str(caught.value) == (
        "source: 'me/none' is neither a data file nor a directory, it cannot be read from "
        f"the cache (it is not there), and {hub.url} has no dataset me/none, or it is "
        "private; the request was made with the token in HF_TOKEN; accepted: files whose "
        f"names end in {', '.join(FILE_TYPES)}, a set that is in the "
        "cache, and with a network one on the Hub (HF_ENDPOINT for a mirror)"
    )
    assert len(hub.requests) == 1


CONFIGS = "---\nconfigs:\n- config_name: default\n  {}\n---\n"


def named_in_the_card(hub: HubServer, fields: str, name: str = "README.md") -> list[Row]:
    text = CONFIGS.format(fields) if name == "README.md" else CONFIGS.format(fields)[4:-4]
    files = {name: text.encode(), "train.jsonl": b'{"a": 7}\n'}
    hub.repositories["datasets/me/data"] = Repository(False, files)
    return list(load_rows("me/data"))


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "fields",
    [
        "data_files: {other}/train.jsonl",
        "data_files: [{{split: train, path: [train.jsonl, '/**/*.jsonl']}}]",
        "data_files: {folder}/rows.jsonl",
        "data_files: hf://datasets/me/other/train.jsonl",
        "data_files: ../other@main/train.jsonl",
        "data_dir: {folder}",
    ],
)
def test_a_hub_set_names_files_of_its_own_repository_alone(
    hub: HubServer, tmp_path: Path, fields: str, name: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 99}\n')
    with HubServer() as other, pytest.raises(DataError, match="in its own repository"):
        named_in_the_card(hub, fields.format(other=other.url, folder=tmp_path), name)
    assert other.requests == []
    assert not [each for each in hub.requests if "tree" in each or "other" in each]


def nested(deep: int) -> object:
    found: object = 1
    for _ in range(deep):
        found = {"x": found}
    return found


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"x", "must be text, a number, a list or an object, found b'x'"),
        (float("nan"), "found nan"),
        (nested(5000), "is nested too deeply"),
    ],
)
def test_what_is_no_json_in_a_chat_is_one_sentence(value: object, what: str) -> None:
    """As the columns of Parquet may have it."""
    call = {"function": {"name": "look", "arguments": {"a": value}}}
    schema = {"name": "look", "parameters": {"default": value}}
    row = Row(
        "row 1", {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [schema]}
    )
    for read in (messages_of, tools_of):
        with pytest.raises(DataError, match=r"^row 1: ") as refused:
            read(row)
        assert what in str(refused.value)


def test_tools_may_be_json_and_nulls_of_parquet_are_left_out() -> None:
    described = {"name": "look", "description": None, "parameters": {"properties": {"a": None}}}
    (tool,) = tools_of(Row("row 1", {"tools": json.dumps([described])}))
    function = {"name": "look", "parameters": {"properties": {}}, "description": ""}
    assert tool.schema == {"type": "function", "function": function}
    for wrong, what in (("[", "field 'tools' is not JSON"), ("7", r"tools\[0\] must be an object")):
        with pytest.raises(DataError, match=f"^row 1: {what}"):
            tools_of(Row("row 1", {"tools": wrong}))
