"""What a run of the recipe logic changed, by kinds of errors."""

import re

import pytest

pytest.importorskip("reasoning_gym")

from es_cookbook.recipes.logic.train_cli import CLIConfig
from tools import logic_errors as errors


def test_errors_are_sorted_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "NUM_TEST", 40)
    errors.main(errors.Config(after=CLIConfig().model_name))
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.endswith("of which after: right, without the last term, wrong otherwise")
    right, careless, otherwise = (list(map(int, re.findall(r"\d+", row))) for row in rows)
    assert right[0] == right[1] > 4  # the same model: every answer is of the same kind
    assert careless[0] == careless[2] > 10
    assert otherwise[0] == otherwise[3] == 40 - right[0] - careless[0]
    assert last.startswith("0 answers became right; 0 of them were among 8 answers of before")
