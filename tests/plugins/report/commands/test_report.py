"""`es-cookbook report`: a page about runs, written or served."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.plugins.report.made_runs import make_run
from tests.said import refused, typed


def test_a_page_is_written_into_the_directory_of_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert typed("report", f"log_path={run}").stdout.startswith(f"{run / 'report.html'}: ")
    assert (run / "report.html").read_bytes().startswith(b"<!doctype html>")


def test_runs_are_given_with_commas_or_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / name)
    typed("report", "log_path=a", "b")
    one_by_one = Path("report.html").read_bytes()
    typed("report", "log_path=a,b", "output=other.html")
    assert Path("other.html").read_bytes() == one_by_one


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused("report", f"log_path={tmp_path / 'empty'}")
    assert "must be a run directory, found nothing there" in refused("report", "log_path=nothing")
    assert not (tmp_path / "empty/report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["log_path="], "log_path must name a run directory"),
        (["log_path=a", "port=70000", "watch=true"], "port must be in [0, 65535]"),
        (["log_path=a", "port=8000"], "port=8000 is for watch=true"),
        (["log_path=a", "watch=true", "output=b.html"], "watch=true writes none"),
        (["log_path=a", "megabytes=0"], "megabytes must be in [1, 500]"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], sentence: str) -> None:
    assert sentence in refused("report", *arguments)


def test_watching_serves_the_page_until_it_is_interrupted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "es_cookbook", "report", f"log_path={run}", "watch=true"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.read().startswith(b"<!doctype html>")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.replace(url.split("/")[3], "guess"), timeout=30)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "no longer served\n")
    assert not (run / "report.html").exists()
