"""A complete run leaves its report, and a report that cannot be written costs no run."""

import base64
import gzip
import json
import logging
import re
from pathlib import Path
from typing import Any

import anyio
import chz
import pytest

from es_cookbook import train
from es_cookbook.runs.history.store import read_history
from tests.tiny_run import TinyConfig, tiny


def short(log_path: Path) -> TinyConfig:
    return tiny(log_path, num_generations=2)


def test_a_complete_run_leaves_its_report(tmp_path: Path) -> None:
    anyio.run(train.main, short(tmp_path / "run"))
    page = (tmp_path / "run/report.html").read_text("utf-8")
    found = re.search(r'id="charts-data">(.*?)<', page)
    assert found is not None
    charts: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    (run,) = charts["runs"]
    assert run["state"] == "complete"
    assert run["columns"]["progress/generation"] == [0, 1, 2]


def test_a_report_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    anyio.run(train.main, short(run))
    (run / "report.html.partial").mkdir()
    (run / "report.html.partial/somebody's").touch()
    longer = chz.replace(short(run), num_generations=3, behavior_if_log_dir_exists="resume")
    with caplog.at_level(logging.WARNING, "es_cookbook"):
        anyio.run(train.main, longer)
    assert len(list(read_history(run / "history.jsonl"))) == 3
    warnings = [record.getMessage() for record in caplog.records]
    assert [text for text in warnings if "report.html" in text] == [
        f"no {run}/report.html: RunDirectoryError: cannot write {run}/report.html: Is a directory"
    ]
