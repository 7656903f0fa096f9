"""Rows that cannot be used are refused before a model is loaded, whichever way they come in.

The ways are generated: every data set that a command line knows by name and that reads rows, alone
and as a part of a mixture, a judged task, and the rows that regularisers add. No tokenizer is
there, so nothing here can have waited for a model.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from es_cookbook.cli.train import built_for
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.options import OptionError
from es_cookbook.common.terminal import as_program
from es_cookbook.plugins.judges.task import JudgedTask
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.plugins.regularisers.preference import PreferencePairs
from es_cookbook.rl.data.problem_dataset import DATASETS
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.matching import Number


class Checked(Protocol):
    def check(self) -> None: ...


NEEDS = {
    "rows": {"dataset.reward": "number"},
    "program": {"dataset.program": "true"},
    "tools": {"dataset.tools": "mcp:true", "dataset.reward": "number"},
}
"""Required options of a data set beside its source."""


def named(name: str) -> Callable[[str], Checked]:
    def way(source: str) -> Checked:
        own = {"dataset.source": source, **NEEDS.get(name, {})}
        with as_program():
            config = built_for("train", {"model_name": "none", "dataset": name, **own})
        return config.dataset

    return way


def in_a_mixture(source: str) -> Checked:
    prefix = "dataset.parts.0"
    own = {f"{prefix}.dataset.source": source, f"{prefix}.dataset.reward": "number"}
    given = {"model_name": "none", "dataset": "mixture", "dataset.parts": "rows", **own}
    with as_program():
        return built_for("train", given).dataset


def ways() -> Iterator[tuple[str, Callable[[str], Checked]]]:
    for name in DATASETS.accepted:
        try:
            named(name)("rows.jsonl")
        except OptionError:  # It makes its problems itself.
            continue
        yield name, named(name)
    yield "mixture", in_a_mixture
    yield "judged", lambda source: JudgedTask(source=source)
    yield "kl", lambda source: KLToBase(weight=1.0, source=source)
    yield "preference", lambda source: PreferencePairs(weight=1.0, source=source)


WAYS = dict(ways())


GOOD = b"".join(
    json.dumps({"question": f"{i} + 1", "answer": i + 1}).encode() + b"\n" for i in range(99)
)
FILES: Mapping[str, bytes | None] = {
    "missing.jsonl": None,
    "empty.jsonl": b"",
    "torn.jsonl": GOOD[:-9],
    "noise.parquet": b"PAR1 and no more",
    "ragged.csv": b"question,answer\n1,2,3\n",
    "folder/": None,
    "https://example.com/rows.jsonl": None,
    "other.jsonl": b'{"colour": "red", "size": 3}\n' * 40,
}
"""Name -> what it holds; a folder holds nothing, and None is not there."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_a_wrong_source_is_one_sentence(name: str, way: str, tmp_path: Path) -> None:
    source, held = name and f"{tmp_path}/{name}", FILES[name]
    if "://" in name:
        source = name
    elif name.endswith("/"):
        (tmp_path / name).mkdir()
    elif held is not None:
        Path(source).write_bytes(held)
    if name == "other.jsonl" and way == "program":
        return  # A program is shown whole rows, whatever they have.
    with pytest.raises((DataError, ConfigError)) as found:
        WAYS[way](source).check()
    assert re.fullmatch(r"\S[^\n]{10,600}", str(found.value)), str(found.value)


def task(tmp_path: Path, rows: list[dict[str, object]], **fields: Any) -> Task:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task(source=str(path), reward=Number(), **fields)


def asked(count: int) -> list[dict[str, object]]:
    return [{"question": f"{i} + 1", "answer": i + 1} for i in range(count)]


def refused(task: Task) -> str:
    with pytest.raises((DataError, ConfigError)) as found:
        task.check()
    return str(found.value).replace(task.source, "rows.jsonl")


def test_a_field_of_the_prompt_that_rows_lack_is_named(tmp_path: Path) -> None:
    assert refused(task(tmp_path, asked(300), prompt="{questoin}")) == (
        "rows.jsonl: all 300 rows lack 'questoin', which dataset.prompt names; did you mean "
        "'question'? Accepted: answer, question"
    )
    rows = [*asked(300), {"question": None, "answer": 2}]
    assert "line 301: field 'question' is missing" in refused(task(tmp_path, rows))
    task(tmp_path, rows, on_bad_row="skip").check()
