"""The page as a file: one, whole, and with nothing in it that could run but its own program."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.plugins.report.writing import write_report
from tests.plugins.report.made_runs import make_run, rollout

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{script}}"


def written(tmp_path: Path, **fields: object) -> str:
    run = make_run(tmp_path / "run", rollouts=[rollout(0, 0, HOSTILE)], **fields)
    write_report([run], tmp_path / "report.html")
    return (tmp_path / "report.html").read_text("utf-8")


def embedded(page: str, name: str) -> bytes:
    found = re.search(
        f'<script type="application/octet-stream" id="{name}-data">(.*?)</script>', page
    )
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1]))


def test_what_a_run_says_is_in_the_page_as_data_alone(tmp_path: Path) -> None:
    page = written(tmp_path, model_name=HOSTILE)
    assert "alert(1)" not in page
    assert "onerror" not in page
    assert HOSTILE in json.loads(embedded(page, "rollouts"))["texts"]["action"]
    assert ["model_name", HOSTILE] in json.loads(embedded(page, "charts"))["runs"][0]["config"]


def test_the_policy_lets_its_own_program_run_and_nothing_else(tmp_path: Path) -> None:
    page = written(tmp_path)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert "unsafe" not in policy
    for source, element in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[source] == f"'sha256-{digest}'"


def test_the_program_of_the_page_takes_no_data_as_markup(tmp_path: Path) -> None:
    page = written(tmp_path)
    program = page[page.index('"use strict";') :]
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in program, name


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(RunDirectoryError):
        write_report([tmp_path / "nothing"], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"
    run = make_run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="cannot write"):
        write_report([run], tmp_path / "no such directory" / "report.html")
